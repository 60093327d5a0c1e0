"""Rewards that fail: asked again, dropped and counted, or the end of the run; never a silent zero."""

import math
import threading

import numpy as np
import pytest
import torch

from sfgrpo.rewards import FailurePolicy, Guard, Mix, RewardError, Term, mix
from sfgrpo.rewards.guard import WrongScores, as_scores
from sfgrpo.scoring import check_dropped

QUICK = {"retry_wait": 0.0}
IMAGES = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 2, 2) / 10
"""The image at place n is of the grey n / 10, which is also its right score."""
NAN = math.nan


def grey(images, prompts, metadata):
    return images.mean((1, 2, 3))


class Reward:
    """`grey`, but what `broken` does on its way; writes down the images of each call."""

    def __init__(self, broken):
        self.broken, self.calls = broken, []

    def __call__(self, images, prompts, metadata):
        assert len(prompts) == len(metadata) == len(images)
        assert [p == f"prompt {m['n']}" for p, m in zip(prompts, metadata, strict=True)] == [True] * len(images)
        rows = [m["n"] for m in metadata]
        torch.testing.assert_close(grey(images, prompts, metadata), torch.tensor(rows) / 10)
        self.calls.append(rows)
        return self.broken(len(self.calls), rows, grey(images, prompts, metadata))


def asked(reward, guard=None, **policy):
    guard = guard or Guard(FailurePolicy(**(QUICK | policy)))
    scores, problems = guard.ask("it", reward, IMAGES, [f"prompt {n}" for n in range(5)], [{"n": n} for n in range(5)])
    assert scores.dtype == torch.float32 and scores.device.type == "cpu"
    return scores.tolist(), problems


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_a_good_reward_is_asked_once():
    reward = Reward(lambda call, rows, scores: scores)
    scores, problems = asked(reward)
    close(scores, [0, 0.1, 0.2, 0.3, 0.4])
    assert problems == [] and reward.calls == [[0, 1, 2, 3, 4]]


def test_a_reward_that_raises_once_loses_nothing():
    def broken(call, rows, scores):
        if call == 1:
            raise ConnectionError("the server is restarting")
        return scores

    reward = Reward(broken)
    scores, problems = asked(reward)
    close(scores, [0, 0.1, 0.2, 0.3, 0.4])
    assert problems == [] and reward.calls == [[0, 1, 2, 3, 4]] * 2


def test_one_bad_image_costs_no_others():
    def broken(call, rows, scores):
        if 3 in rows:
            raise RuntimeError("image file is truncated\nand more lines")
        return scores

    reward = Reward(broken)
    scores, problems = asked(reward)
    close(scores, [0, 0.1, 0.2, NAN, 0.4])
    assert problems == ["reward it gave no score for 1 of 5 images: RuntimeError: image file is truncated"]
    assert reward.calls == [[0, 1, 2, 3, 4]] * 2 + [[0], [1], [2], [3], [4]]


def test_a_reward_that_always_raises_is_not_tried_on_every_image():
    def broken(call, rows, scores):
        raise ValueError

    reward = Reward(broken)
    scores, problems = asked(reward, retries=0)
    close(scores, [NAN] * 5)
    assert problems == ["reward it gave no score for 5 of 5 images: ValueError"]
    assert reward.calls == [[0, 1, 2, 3, 4], [0], [1], [2]]


@pytest.mark.parametrize("odd", (math.nan, math.inf, -math.inf))
def test_only_the_images_without_a_finite_score_are_asked_for_again(odd):
    def broken(call, rows, scores):
        return torch.tensor([odd if n in (1, 4) and (call == 1 or n == 4) else n / 10 for n in rows])

    reward = Reward(broken)
    scores, problems = asked(reward, retries=2)
    close(scores, [0, 0.1, 0.2, 0.3, NAN])
    assert reward.calls == [[0, 1, 2, 3, 4], [1, 4], [4]]
    assert problems == ["reward it gave no score for 1 of 5 images: a score was NaN or infinite"]


@pytest.mark.parametrize(
    "answer",
    [
        [1, 2.5, None],
        (1, 2.5, math.nan),
        np.array([1, 2.5, np.nan]),
        torch.tensor([1, 2.5, math.nan], dtype=torch.float64),
        torch.tensor([[1], [2.5], [math.nan]], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), torch.tensor(2.5), torch.tensor(math.nan)],
    ],
)
def test_scores_come_as_many_kinds_of_numbers(answer):
    scores = as_scores(answer, 3)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    np.testing.assert_array_equal(scores.numpy(), np.array([1, 2.5, np.nan], dtype=np.float32))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([0.5, 0.5], r"returned scores of shape \(2,\) for 3 images"),
        (0.5, r"returned scores of shape \(\) for 3 images"),
        (torch.zeros(3, 2), r"returned scores of shape \(3, 2\) for 3 images"),
        (torch.zeros(1, 3), r"returned scores of shape \(1, 3\) for 3 images"),
        (None, "returned NoneType in place of 3 numbers"),
        ("high", "returned str in place of 3 numbers"),
        (["a", "b", "c"], "returned list in place of 3 numbers"),
        ({"scores": [1, 2, 3]}, "returned dict in place of 3 numbers"),
        (torch.zeros(3, device="meta"), "returned Tensor in place of 3 numbers"),
    ],
)
def test_anything_else_is_no_score(answer, words):
    with pytest.raises(WrongScores, match=f"^{words}$"):
        as_scores(answer, 3)
    scores, problems = asked(lambda images, prompts, metadata: answer, retries=0)
    close(scores, [NAN] * 5)
    assert "returned " in problems[0]
    with pytest.raises(WrongScores, match="^reward it returned"):
        Mix((Term("it", lambda images, prompts, metadata: answer),))(IMAGES[:3], ["x"] * 3, [{}] * 3)


def test_a_reward_that_hangs_is_left_and_then_ends_the_run():
    release = threading.Event()

    def broken(call, rows, scores):
        release.wait(60)
        return scores

    reward, guard = Reward(broken), Guard(FailurePolicy(retries=1, timeout=0.2, retry_wait=0.0))
    try:
        for _ in range(2):
            scores, problems = asked(reward, guard)
            close(scores, [NAN] * 5)
            assert problems == ["reward it gave no score for 5 of 5 images: no answer within 0.2 s"]
        with pytest.raises(RewardError, match=r"reward it hangs: no answer within 0\.2 s, 3 batches in a row"):
            asked(reward, guard)
        assert reward.calls == [[0, 1, 2, 3, 4]] * 6
    finally:
        release.set()


def test_an_answer_in_time_forgives_those_that_were_late():
    release = threading.Event()

    def broken(call, rows, scores):
        if call != 3:
            release.wait(60)
        return scores

    reward, guard = Reward(broken), Guard(FailurePolicy(retries=0, timeout=0.2, **QUICK))
    try:
        late = [asked(reward, guard)[0] for _ in range(5)]
        assert [math.isnan(scores[0]) for scores in late] == [True, True, False, True, True]
    finally:
        release.set()


def test_cancel_gets_through_a_reward_that_hangs():
    class Cancelled(Exception):
        pass

    def cancel():
        raise Cancelled

    release = threading.Event()

    def broken(call, rows, scores):
        release.wait(60)

    try:
        with pytest.raises(Cancelled):
            asked(Reward(broken), Guard(FailurePolicy(), on_wait=cancel))
    finally:
        release.set()


def test_memory_that_runs_out_is_not_the_rewards_fault():
    def broken(call, rows, scores):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        asked(Reward(broken))


def test_stop_in_place_of_dropping():
    def broken(call, rows, scores):
        raise SystemExit("I give up")

    with pytest.raises(RewardError, match="reward it gave no score for 5 of 5 images: SystemExit: I give up"):
        asked(Reward(broken), then="stop")


def test_the_share_that_may_be_dropped():
    score = mix({"shapes": 1.0}, FailurePolicy(max_dropped=0.25))
    check_dropped(score, 2, 8, [])
    with pytest.raises(RewardError, match=r"3 of 8 images have no score, more than failures\.max_dropped = 0\.25"):
        check_dropped(score, 3, 8, [])
    with pytest.raises(RewardError, match="the last reason: the second"):
        check_dropped(score, 8, 8, ["the first", "the second"])
    check_dropped(mix({"shapes": 1.0}), 8, 8, [])


def test_what_is_only_watched_does_not_enter_the_sum_even_as_nan():
    broken = Term("broken", lambda images, prompts, metadata: [NAN] * len(images), 0.0)
    score = Mix((Term("grey", grey, 2.0), broken), Guard(FailurePolicy(retries=0, **QUICK)))
    scores = score(IMAGES, [""] * 5, [{}] * 5)
    close(scores.total.tolist(), [0, 0.2, 0.4, 0.6, 0.8])
    assert bool(scores.parts["broken"].isnan().all()) and len(scores.problems) == 1
    close(Mix((broken,))(IMAGES, [""] * 5, [{}] * 5).total.tolist(), [0] * 5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"retries": -1}, "retries must be 0 or more"),
        ({"retry_wait": math.nan}, "retry_wait must be 0 or more seconds"),
        ({"timeout": -1.0}, "timeout must be 0 or more seconds"),
        ({"then": "ignore"}, "then must be drop or stop, got 'ignore'"),
        ({"max_dropped": 1.5}, "max_dropped must be from 0 to 1"),
    ],
)
def test_settings_outside_their_range(settings, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        FailurePolicy(**settings)
