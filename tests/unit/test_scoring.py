"""Scores of images by functions that are no Mix."""

import torch

from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores
from sfgrpo.scoring import score_images


def test_a_scoring_function_cannot_change_what_it_is_given():
    def vandal(images, prompts, metadata) -> Scores:
        total = images.mean((1, 2, 3))
        images.zero_()
        prompts.clear()
        metadata[0]["boxes"].append(1)
        metadata[0]["count"] = 9
        return Scores(total, {"mean": total})

    images, prompt = torch.full((1, 3, 2, 2), 0.5), Prompt("a", "", {"boxes": [], "count": 1})
    for _ in range(2):
        assert score_images(vandal, images, [prompt]).total.tolist() == [0.5]
    assert images.unique().tolist() == [0.5] and prompt.metadata == {"boxes": [], "count": 1}
