"""What a probe shows: the clean estimates as a board of tiles, and rewards and gains as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .pictures import Colour, arrange, tile, titled
from .plot import Series, plot
from .probe import Probe
from .rollout import DistinctStates

if TYPE_CHECKING:
    from PIL import Image

WIDEST = 4000
"""Width of the board, pixels, to which images that are large are shrunk; never below SMALLEST each."""
SMALLEST = 128
ROWS = 32
"""Trajectories on the board; the numbers hold all."""
LINES = 6
"""Prompts up to which each has a line of its own in the plot."""
GAIN, LOSS = (120, 184, 230), (245, 160, 110)
"""Ground of the largest gain and of the largest loss on the board; smaller ones are paler."""


class Board:
    """The clean estimates, filled as they come: a row a trajectory, a column a state, reward and gain below each.

    Holds thumbnails only.
    """

    def __init__(self, prompts: Sequence[str], members: int, sigmas: Tensor) -> None:
        """sigmas: (T + 1,), the columns."""
        self.prompts, self.members, self.sigmas = prompts, members, sigmas
        self.largest = max(SMALLEST, WIDEST // len(sigmas))
        self._index: list[list[int]] = []
        self._thumbnails: dict[int, Tensor] = {}
        self._scores: dict[int, float] = {}

    def add(self, states: DistinctStates, part: slice, images: Tensor, scores: Tensor) -> None:
        """Take the estimates of states[part]: images (b, 3, H, W) in [0, 1], scores (b,)."""
        self._index = states.index.tolist()
        height, width = images.shape[-2:]
        factor = self.largest / max(height, width)
        if factor < 1:
            images = F.interpolate(images, (max(1, round(height * factor)), max(1, round(width * factor))), mode="area")
        for m, (image, score) in enumerate(zip(images.cpu(), scores.tolist(), strict=True), start=part.start):
            self._thumbnails[m], self._scores[m] = image, score

    def draw(self) -> Image.Image:
        """The board so far; a place that is not filled yet is grey."""
        blank = torch.full_like(next(iter(self._thumbnails.values())), 0.94)
        rewards = [[self._scores.get(m, math.nan) for m in row] for row in self._index]
        gains = [[math.nan] + [b - a for a, b in zip(row, row[1:], strict=False)] for row in rewards]
        largest = max((abs(g) for row in gains for g in row if math.isfinite(g)), default=0.0) or 1.0
        rows, sheets = min(self.members, ROWS), []
        for p, prompt in enumerate(self.prompts[: max(1, ROWS // self.members)]):
            here = range(p * self.members, p * self.members + rows)
            tiles = tile(
                torch.stack([self._thumbnails.get(m, blank) for r in here for m in self._index[r]]),
                [_caption(x, g) for r in here for x, g in zip(rewards[r], gains[r], strict=True)],
                len(self.sigmas),
                column_labels=[f"sigma {s:.3f}" for s in self.sigmas.tolist()],
                row_labels=[str(n + 1) for n in range(rows)],
                shades=[_shade(g / largest) for r in here for g in gains[r]],
                font_size=15,
            )
            sheets.append(titled(tiles, prompt, 18))
        left_out = len(self._index) - rows * len(sheets)
        sheet = arrange(sheets, gap=6)
        return titled(sheet, f"{left_out} more trajectories are in the numbers only", 18) if left_out else sheet


def _caption(reward: float, gain: float) -> str:
    reward_text = f"{reward:.3f}" if math.isfinite(reward) else ""
    return reward_text + "\n" + (f"{gain:+.3f}" if math.isfinite(gain) else "")


def _shade(share: float) -> Colour | None:
    """Ground for a gain of this share of the largest, -1..1."""
    if not math.isfinite(share):
        return None
    r, g, b = (round(255 + abs(share) * (c - 255)) for c in (GAIN if share > 0 else LOSS))
    return r, g, b


def draw_plot(result: Probe, prompts: Sequence[str]) -> Image.Image:
    """Reward by state above gain by step: the mean of each prompt, or of all where there are many."""
    groups, members = result.rewards.shape[:2]
    rewards, gains = result.rewards.flatten(0, 1), result.gains.flatten(0, 1)
    count = len(rewards)
    lines = [Series(y=row, faint=True) for row in rewards[:64].tolist()] if count > 1 else []
    if 1 < groups <= LINES:
        means = result.rewards.nanmean(1).tolist()
        lines += [Series(y=row, label=prompt) for row, prompt in zip(means, prompts, strict=True)]
    else:
        label = f"mean of {count} trajectories" if count > 1 else "reward"
        lines.append(Series(y=rewards.nanmean(0).tolist(), label=label))
    bars = [Series(y=gains.nanmean(0).tolist(), label="mean gain", bars=True)]
    if count > 1:
        bars.append(Series(y=gains.abs().nanmean(0).tolist(), label="mean size of a gain", bars=True))
    size = {"width": 960, "height": 380}
    states, steps = "state, from noise to image", "step, from noise to image"
    return arrange(
        [
            plot(lines, title="Reward of the clean estimate", x_label=states, y_label="reward", **size),
            plot(bars, title="Gain of each step", x_label=steps, y_label="gain in reward", **size),
        ],
        gap=8,
    )
