"""OCR: does the picture show the text that its prompt asks for? Read by rapidocr, whose wheel holds its models.

The text asked for is the field `text` of the metadata (a string or a list of them), or else what stands in quotation
marks in the prompt: "A", “A”, „A“, «A», »A«, 「A」, 『A』, and, where there are none of these, 'A' or ‘A’ (an
apostrophe within a word is no quotation mark). Both it and what was read are brought to one form: NFKC, small letters
unless `case`, typographic quotation marks and dashes as plain ones, any run of whitespace as one space, none beside
Chinese and Japanese characters. With d the edit distance (Levenshtein) of two strings,

    similarity(a, b) = 1 - d(a, b) / max(|a|, |b|)

One string asked for is held against all that was read, lines joined by spaces in reading order, so that text beside
it costs credit. Of several strings each is held against that run of successive lines which matches it best, and the
score is the mean; text beside them is free then, and one line serves two equal strings.

The reward of Flow-GRPO (arXiv 2505.05470) drops all spaces, reads by PaddleOCR, and gives 1 to any picture that
contains the string: `match = "substring"` is nearest to it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

INSTALL = 'pip install "rapidocr>=3.10,<4" "onnxruntime>=1.17" "rapidfuzz>=3.6"'

QUOTED = re.compile(r'(?<!\d)"([^"]+)"|„([^“”"]+)[“”"]|“([^”]+)”|«([^»]+)»|»([^«]+)«|「([^」]+)」|『([^』]+)』')
"""A straight mark after a digit means inches."""

SINGLE = re.compile(r"(?<!\w)['‘](?=\S)(?!n['’])((?:[^'’\n]|(?<=\w)['’](?=\w))+)(?<=\S)['’](?!\w)")
"""But for rock 'n' roll."""

PLAIN = str.maketrans("‘’‚‛“”„‟«»‐‑‒–—−", '\'\'\'\'""""""------')

CJK = "\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
BESIDE_CJK = re.compile(rf"(?<=[{CJK}]) | (?=[{CJK}])")


def quoted(prompt: str) -> list[str]:
    """The strings in quotation marks, in their order; single marks count only where there are no others."""
    for pattern in (QUOTED, SINGLE):
        strings = [next(filter(None, match.groups())).strip() for match in pattern.finditer(prompt)]
        if any(strings):
            return [s for s in strings if s]
    return []


def targets(prompt: str, metadata: Mapping) -> list[str]:
    """The strings that a picture must show. Raises ValueError, naming the prompt, where it asks for none."""
    given = metadata.get("text")
    if given is None:
        strings = quoted(prompt)
        if not strings:
            raise ValueError(
                f"the ocr reward finds no text to read in prompt {prompt!r}; put the text in quotation marks, or give "
                f'it as "text" beside the prompt in a .jsonl file'
            )
        return strings
    strings = [given] if isinstance(given, str) else given
    if (
        not isinstance(strings, (list, tuple))
        or not strings
        or not all(isinstance(s, str) and s.strip() for s in strings)
    ):
        raise ValueError(
            f'"text" of prompt {prompt!r} must be a string or a list of strings, none empty, not {given!r}'
        )
    return list(strings)


def normalise(text: str, case: bool = False) -> str:
    """The one form in which texts are compared (see the module's docstring)."""
    text = unicodedata.normalize("NFKC", text).translate(PLAIN)
    if not case:
        text = unicodedata.normalize("NFKC", text.casefold())
    return BESIDE_CJK.sub("", " ".join(text.split()))


def credit(lines: Sequence[str], strings: Sequence[str], match: str = "similarity", case: bool = False) -> float:
    """Score in [0, 1] of the lines that were read, in reading order, for the strings asked for."""
    from rapidfuzz.distance import Levenshtein

    n = len(lines)
    spans = [(0, n)] if len(strings) == 1 else [(i, j) for i in range(n) for j in range(i + 1, n + 1)]
    whole = normalise(" ".join(lines), case)
    runs = {normalise(" ".join(lines[i:j]), case) for i, j in spans}
    scores = []
    for string in strings:
        asked = normalise(string, case)
        if match == "exact":
            scores.append(float(asked in runs))
        elif match == "substring" and asked in whole:
            scores.append(1.0)
        else:
            scores.append(max((Levenshtein.normalized_similarity(asked, run) for run in runs), default=0.0))
    return sum(scores) / len(scores)


def reading_order(boxes: np.ndarray) -> list[int]:
    """Indices of (N, 4, 2) text boxes (corners x, y), row by row from the top, each row from the left.

    A box belongs to a row where the heights of their centres differ by less than half of the lower of the two.
    """
    top, bottom, left = boxes[:, :, 1].min(1), boxes[:, :, 1].max(1), boxes[:, :, 0].min(1)
    centre, height = (top + bottom) / 2, bottom - top
    rows: list[list[int]] = []
    for i in centre.argsort(kind="stable").tolist():
        row = rows[-1] if rows else []
        if row and centre[i] - centre[row].mean() < 0.5 * min(height[i], height[row].mean()):
            row.append(i)
        else:
            rows.append([i])
    return [i for row in rows for i in sorted(row, key=lambda k: left[k])]


@dataclass(frozen=True, kw_only=True)
class OCR:
    """`[rewards] ocr`: score of the text in each picture, in [0, 1]; runs on the CPU.

    Raises ValueError for a prompt without text to read, for a letter that the recogniser does not know, and where
    rapidocr is not installed.
    """

    match: Literal["similarity", "exact", "substring"] = "similarity"
    """`similarity`: the similarity of the module's docstring. `exact`: 1 where nothing differs, else 0. `substring`: 1
    where the string occurs in what was read, else the similarity; a picture full of text passes it too."""
    case: bool = False
    """Whether small and capital letters differ."""
    min_confidence: float = 0.5
    """Lines that the recogniser is less sure of, in [0, 1], count as not read."""
    detect_side: int = 512
    """Pixels; pictures whose shorter side is less are enlarged to it for the detector. rapidocr's own is 736,
    which takes twice as long, and read no more of rendered text of 9 pixels and up."""
    model: str = ""
    """An .onnx file of another PaddleOCR recogniser that holds its alphabet, for scripts that rapidocr's own lacks: it
    reads Latin, Chinese and Japanese. "" is its own."""
    threads: int = 0
    """Of the CPU; 0 is as many as torch uses, at most 4."""

    def __post_init__(self) -> None:
        if self.match not in ("similarity", "exact", "substring"):
            raise ValueError(f"match must be similarity, exact or substring, not {self.match!r}")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence must be from 0 to 1, not {self.min_confidence}")
        if self.detect_side < 32:
            raise ValueError(f"detect_side must be at least 32 pixels, not {self.detect_side}")
        if self.threads < 0:
            raise ValueError(f"threads must be 0 (as many as torch uses, at most 4) or more, not {self.threads}")
        if self.model and not Path(self.model).expanduser().is_file():
            raise ValueError(f"model must be an .onnx file; there is none at {self.model}")

    def check(self) -> None:
        """Raise ValueError where rapidocr is not installed."""
        self._engine  # noqa: B018

    def check_prompt(self, prompt: str, metadata: Mapping, size: tuple[int, int]) -> None:
        """Raise ValueError for a prompt without text to read, or with letters that the recogniser does not know."""
        self._targets(prompt, metadata)

    def free(self) -> None:
        """Let the models go; the next call loads them again."""
        self.__dict__.pop("_engine", None)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
        """Scores (B,) float32 in [0, 1] of (B, 3, H, W) pictures in [0, 1]; NaN where a pixel is not finite."""
        metadata = [{}] * len(prompts) if metadata is None else metadata
        asked = [self._targets(p, m) for p, m in zip(prompts, metadata, strict=True)]
        pixels = (images.detach().float().clamp(0, 1) * 255).round().byte().cpu().movedim(1, -1).numpy()
        scores = [
            credit(self.read(picture), strings, self.match, self.case)
            for picture, strings in zip(pixels, asked, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32).where(images.isfinite().flatten(1).all(1).cpu(), torch.nan)

    def read(self, picture: np.ndarray) -> list[str]:
        """The lines of text in an (H, W, 3) uint8 RGB picture, in reading order."""
        if picture.min() == picture.max():
            return []
        result = self._engine(picture[..., ::-1].copy())
        return [] if result.txts is None else [result.txts[i] for i in reading_order(result.boxes)]

    @cached_property
    def _engine(self):
        try:
            import onnxruntime  # noqa: F401
            import rapidfuzz  # noqa: F401
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ValueError(f"the ocr reward needs rapidocr ({error}); install it: {INSTALL}") from None
        params = {
            "Global.log_level": "error",
            "Global.text_score": self.min_confidence,
            "Global.use_cls": False,  # Text upside down is not text that was asked for.
            "Det.limit_side_len": self.detect_side,
            "EngineConfig.onnxruntime.intra_op_num_threads": self.threads or min(4, torch.get_num_threads()),
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
        if self.model:
            params["Rec.model_path"] = str(Path(self.model).expanduser())
        return RapidOCR(params=params)

    @cached_property
    def _alphabet(self) -> frozenset[str]:
        return frozenset(self._engine._load_rec_model().postprocess_op.character)

    def _targets(self, prompt: str, metadata: Mapping) -> list[str]:
        strings = targets(prompt, metadata)
        letters = {c for c in unicodedata.normalize("NFKC", "".join(strings)) if c.isalnum()}
        unknown = sorted(c for c in letters if self._alphabet.isdisjoint((c, c.lower(), c.upper())))
        if unknown:
            raise ValueError(
                f"the recogniser does not know {' '.join(unknown)} of prompt {prompt!r}; leave the prompt out, or set "
                f"`model` to a recogniser that reads its script"
            )
        return strings
