"""Reward nodes in a running ComfyUI: scores against the core's on the same pixels, mixes, and mistakes."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from sfgrpo.rewards.jpeg import jpeg_size_reward
from sfgrpo.rewards.shapes import shapes_reward
from sfgrpo.shapes.captions import parse
from sfgrpo.shapes.scenes import render, scenes_for

WORKFLOW = Path(__file__).parents[2] / "workflows" / "api" / "score_images.json"
TEXTS = ["a red circle", "two squares", "a circle left of a cross"]


class Graph:
    """An API prompt; `add` returns a function from slot to link."""

    def __init__(self, server):
        self.server, self.nodes = server, {}

    def add(self, kind, **inputs):
        name = str(len(self.nodes) + 1)
        self.nodes[name] = {"class_type": kind, "inputs": inputs}
        return lambda slot=0: [name, slot]

    def show(self, link):
        """A node that shows a value as text; returns its id."""
        return self.add("PreviewAny", source=link)()[0]

    def run(self):
        return self.server.run(self.nodes)


@pytest.fixture
def graph(server):
    return Graph(server)


@pytest.fixture(scope="module")
def pictures(server):
    """(3, 3, 32, 32) scenes of TEXTS, the last not as asked, as whole levels; they lie in the input folder too."""
    images = render(scenes_for([parse(t) for t in TEXTS], torch.Generator().manual_seed(0)))
    images[2] = images[1]
    levels = (images * 255).round().byte()
    for n, image in enumerate(levels):
        Image.fromarray(image.movedim(0, -1).numpy()).save(server.input / f"scene{n}.png")
    return levels.float() / 255


def load(graph, numbers=(0, 1, 2)):
    """The pictures as one IMAGE batch."""
    batch = None
    for n in numbers:
        image = graph.add("LoadImage", image=f"scene{n}.png")()
        batch = image if batch is None else graph.add("ImageBatch", image1=batch, image2=image)()
    return batch


def score(graph, images, reward, prompts):
    """(JSON, shown text, outcome) of Score Images."""
    node = graph.add("SFGRPO_ScoreImages", images=images, reward=reward, prompts=prompts)
    data = graph.show(node(2))
    outcome = graph.run()
    assert outcome.status == "success", outcome.error
    return json.loads(outcome.outputs[data]["text"][0]), outcome.outputs[node()[0]]["text"][0], outcome


@pytest.mark.parametrize("mode", ("soft", "strict"))
def test_the_verifier_gives_the_cores_scores(graph, pictures, mode):
    reward = graph.add("SFGRPO_ShapesReward", mode=mode)
    data, text, _ = score(graph, load(graph), reward(), "\n".join(TEXTS))
    expected = shapes_reward(pictures, TEXTS, mode=mode)
    assert [row["score"] for row in data["images"]] == expected.tolist()
    assert [row["prompt"] for row in data["images"]] == TEXTS
    assert data["mean"] == expected.mean().item()
    name = "shapes" if mode == "soft" else "shapes_strict"
    assert [row["rewards"] for row in data["images"]] == [{name: value} for value in expected.tolist()]
    assert text.splitlines()[0] == f"mean {expected.mean():.4f} of 3 images"
    assert text.splitlines()[1:] == [
        f"{n + 1}. {v:.4f}  {t}" for n, (v, t) in enumerate(zip(expected, TEXTS, strict=True))
    ]
    assert 0.6 < expected[0] and expected[2] < 0.5


@pytest.mark.parametrize("quality", (95, 30))
def test_jpeg_size_gives_the_cores_scores(graph, pictures, quality):
    reward = graph.add("SFGRPO_JPEGSizeReward", quality=quality)
    data, _, _ = score(graph, load(graph), reward(), "anything at all")
    expected = jpeg_size_reward(pictures, TEXTS, quality=quality)
    assert [row["score"] for row in data["images"]] == expected.tolist()
    assert {row["prompt"] for row in data["images"]} == {"anything at all"}


def test_scores_come_as_a_list_of_floats_and_their_mean(graph, pictures):
    reward = graph.add("SFGRPO_ShapesReward", mode="soft")
    node = graph.add("SFGRPO_ScoreImages", images=load(graph), reward=reward(), prompts="two squares")
    floats, mean = graph.show(node(0)), graph.show(node(1))
    outputs = graph.run().outputs
    expected = shapes_reward(pictures, ["two squares"] * 3)
    assert [float(text) for text in outputs[floats]["text"]] == expected.tolist()
    assert [float(text) for text in outputs[mean]["text"]] == [expected.mean().item()]


def test_a_mix_is_the_weighted_sum_and_keeps_terms_of_one_name(graph, pictures):
    fine, coarse = (graph.add("SFGRPO_JPEGSizeReward", quality=q)() for q in (95, 30))
    shapes = graph.add("SFGRPO_ShapesReward", mode="strict")()
    inner = graph.add("SFGRPO_RewardMix", reward_1=fine, weight_1=-2.0, reward_3=shapes, weight_3=4.0)()
    outer = graph.add("SFGRPO_RewardMix", reward_2=inner, weight_2=0.5, reward_4=coarse, weight_4=3.0)()
    data, text, _ = score(graph, load(graph), outer, "\n".join(TEXTS))
    parts = {
        "jpeg_size": jpeg_size_reward(pictures, TEXTS, quality=95),
        "shapes_strict": shapes_reward(pictures, TEXTS, mode="strict"),
        "jpeg_size_2": jpeg_size_reward(pictures, TEXTS, quality=30),
    }
    total = -parts["jpeg_size"] + 2 * parts["shapes_strict"] + 3 * parts["jpeg_size_2"]
    assert [row["rewards"] for row in data["images"]] == [{k: v[n].item() for k, v in parts.items()} for n in range(3)]
    assert [row["score"] for row in data["images"]] == pytest.approx(total.tolist(), abs=1e-5)
    assert all(f"{name} {values[0]:.4f}" in text.splitlines()[1] for name, values in parts.items())


def test_a_weight_of_minus_1_prefers_plain_images(graph, pictures):
    jpeg = graph.add("SFGRPO_JPEGSizeReward", quality=95)()
    mix = graph.add("SFGRPO_RewardMix", reward_1=jpeg, weight_1=-1.0)()
    data, _, _ = score(graph, load(graph), mix, "x")
    assert [row["score"] for row in data["images"]] == (-jpeg_size_reward(pictures, TEXTS)).tolist()


def test_an_alpha_channel_is_left_out(graph, pictures):
    image = load(graph, [0])
    mask = graph.add("SolidMask", value=0.5, width=32, height=32)()
    transparent = graph.add("JoinImageWithAlpha", image=image, alpha=mask)()
    data, _, _ = score(graph, transparent, graph.add("SFGRPO_ShapesReward", mode="soft")(), TEXTS[0])
    assert data["images"][0]["score"] == shapes_reward(pictures[:1], TEXTS[:1]).item()


def test_a_long_batch_is_cut_on_the_node_and_whole_in_the_numbers(graph, pictures):
    many = graph.add("RepeatImageBatch", image=load(graph, [0]), amount=25)()
    data, text, _ = score(graph, many, graph.add("SFGRPO_ShapesReward", mode="soft")(), TEXTS[0])
    assert len(data["images"]) == 25
    assert len(text.splitlines()) == 22 and text.splitlines()[-1] == "... and 5 more"


@pytest.mark.parametrize(
    "prompts, words",
    (
        (
            "a red circle\ntwo squares",
            "2 prompts for 3 images; write one prompt for all images, or one a line for each",
        ),
        (" \n\n", "no prompt given; write one a line"),
        ("a red circle\na cat\ntwo squares", "'a cat' is not a caption that the shapes verifier can check; write one"),
    ),
)
def test_prompts_that_do_not_fit_are_named_in_one_sentence(graph, pictures, prompts, words):
    reward = graph.add("SFGRPO_ShapesReward", mode="soft")()
    graph.add("SFGRPO_ScoreImages", images=load(graph), reward=reward, prompts=prompts)
    outcome = graph.run()
    assert outcome.status == "error"
    assert outcome.error.startswith(words) and "\n" not in outcome.error


def test_images_of_another_size_are_named(graph):
    image = graph.add("EmptyImage", width=64, height=48, batch_size=1, color=0)()
    reward = graph.add("SFGRPO_ShapesReward", mode="soft")()
    graph.add("SFGRPO_ScoreImages", images=image, reward=reward, prompts="a circle")
    assert graph.run().error == "the shapes verifier reads 32 x 32 pictures, not 64 x 48"


def test_an_empty_mix_is_named(graph, pictures):
    mix = graph.add("SFGRPO_RewardMix", weight_1=0.5)()
    graph.add("SFGRPO_ScoreImages", images=load(graph, [0]), reward=mix, prompts="a circle")
    assert graph.run().error == "Reward Mix has no reward; connect at least one, such as Shapes Reward"


def test_the_workflow_runs(server):
    outcome = server.run(json.loads(WORKFLOW.read_text()))
    assert outcome.status == "success", outcome.error
    files = [server.output / image["filename"] for image in outcome.outputs["10"]["images"]]
    pixels = torch.stack([torch.frombuffer(bytearray(Image.open(f).tobytes()), dtype=torch.uint8) for f in files])
    images = pixels.view(4, 32, 32, 3).movedim(-1, 1).float() / 255
    shapes = shapes_reward(images, ["two red circles"] * 4)
    shown = outcome.outputs["9"]["text"][0].splitlines()
    # The saved pixels are rounded down to whole levels, which moves the verifier a little.
    scores = [float(line.split("shapes ")[1].split(",")[0]) for line in shown[1:]]
    assert scores == pytest.approx(shapes.tolist(), abs=0.05)
    assert max(scores) > 0.8
