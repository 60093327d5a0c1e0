"""GenEval: objects, counts, colours and positions, as a detector and a CLIP see them; the rules are in `geneval_rules`.

GenEval itself (Ghosh et al. 2023, arXiv 2310.11513) finds objects by Mask2Former, through mmdet, which no longer
installs. Here a zero-shot detector of transformers looks for the classes that the prompt's metadata names, and only for
those. So

- any class can be asked for, not only the 80 of COCO;
- a colour is read from the whole box; GenEval first greys out what lies outside of the object's mask;
- boxes that overlap by `max_overlap` are one object, for the detectors give several boxes to one;
- `counting_threshold` is not GenEval's 0.9, which the scores of these detectors hardly ever reach.

The scores are not comparable with published ones. Each box belongs to the class that fits it best (OWLv2, OWL-ViT);
Grounding DINO is asked for one class at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from .clip import pooled
from .geneval_rules import COLOURS, Detection, Task, judge, keep, read_task
from .models import RewardModel, Tokens, find_folder, first_line, open_config, open_pretrained, open_tokenizer
from .pixels import cropped

DETECTORS = ("owlv2", "owlvit", "grounding-dino")

COLOUR_QUERIES = (
    "a photo of a {colour} {name}",
    "a photo of a {colour}-colored {name}",
    "a photo of a {colour} object",
)
"""GenEval's; the embeddings of the three are averaged."""

LEAST_CROP = 16
"""Pixels; a thinner box is widened before its colour is read."""


@dataclass(frozen=True, kw_only=True)
class GenEval(RewardModel):
    """`[rewards] geneval`; in [0, 1]. Raises ValueError that names prompt and field where metadata is not GenEval's."""

    model: str = "google/owlv2-base-patch16-ensemble"
    """Folder or hub id of the detector: OWLv2, OWL-ViT or Grounding DINO; 0.6 GB."""
    clip: str = "openai/clip-vit-large-patch14"
    """Folder or hub id of the CLIP model that names colours; 1.7 GB. GenEval's own."""
    mode: Literal["soft", "strict"] = "soft"
    """`strict`: 1 where all is as asked, else 0. `soft`: the share of it, see `geneval_rules`."""
    threshold: float = 0.3
    """Least score of an object, in [0, 1]."""
    counting_threshold: float = 0.3
    """The same for prompts with the tag `counting`. GenEval has 0.9, for Mask2Former; OWLv2 gives 0.61 and 0.67
    to two cats in full view (the example in its documentation), so that nothing would be counted."""
    max_objects: int = 16
    """Most objects of a class."""
    max_overlap: float = 0.5
    """Boxes of a class whose IoU with a surer one is this or more are the same object; 1 keeps all, as GenEval does."""
    position_threshold: float = 0.1
    """How far two centres must be apart for a relation, as a share of the sum of their sizes."""
    query: str = "a photo of a {}"
    """What OWLv2 is asked, with {} for the class. Grounding DINO is asked for the class alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("soft", "strict"):
            raise ValueError(f"mode must be soft or strict, got {self.mode!r}")
        for name in ("threshold", "counting_threshold", "max_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.max_objects < 1:
            raise ValueError("max_objects must be 1 or more")
        if not self.position_threshold >= 0:
            raise ValueError("position_threshold must be 0 or more")
        if "{}" not in self.query:
            raise ValueError(f"query must hold {{}}, for the class, got {self.query!r}")

    def load(self) -> nn.Module:
        from transformers import AutoModelForZeroShotObjectDetection, CLIPModel

        open_config("model", self.model, DETECTORS)
        open_config("clip", self.clip, ["clip"])
        detector = open_pretrained(AutoModelForZeroShotObjectDetection, "model", self.model)
        return nn.ModuleDict({"detector": detector, "clip": open_pretrained(CLIPModel, "clip", self.clip)})

    def open_tokenizer(self) -> Tokens:
        """CLIP's, for the colours."""
        config = open_config("clip", self.clip, ["clip"])
        return open_tokenizer("clip", self.clip, config.text_config.max_position_embeddings)

    @property
    def processor(self) -> Any:
        """The detector's, opened once."""
        from transformers import AutoProcessor

        with self._lock:
            if "processor" not in self._kept:
                open_config("model", self.model, DETECTORS)
                try:
                    self._kept["processor"] = AutoProcessor.from_pretrained(find_folder("model", self.model))
                except (OSError, ValueError, KeyError) as error:
                    raise ValueError(f"model {self.model} has no processor to be had: {first_line(error)}") from None
            return self._kept["processor"]

    def check(self) -> None:
        super().check()
        self.processor  # noqa: B018

    def check_prompt(self, prompt: str, metadata: Mapping, size: tuple[int, int]) -> None:
        read_task(prompt, metadata)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
        metadata = [{}] * len(prompts) if metadata is None else metadata
        # What is batched with the images is what `score` needs of the prompts.
        scores = super().__call__(images, [read_task(p, m) for p, m in zip(prompts, metadata, strict=True)])
        return scores.where(images.isfinite().flatten(1).all(1).cpu(), torch.nan)

    def score(self, model: nn.Module, images: Tensor, tasks: Sequence[Task]) -> Tensor:
        verdicts = [
            judge(task, found, self.position_threshold)
            for task, found in zip(tasks, self.find(model, images, tasks), strict=True)
        ]
        return torch.tensor([getattr(verdict, self.mode) for verdict in verdicts])

    def find(self, model: nn.Module, images: Tensor, tasks: Sequence[Task]) -> list[dict[str, list[Detection]]]:
        """For each of (b, 3, H, W) images in [0, 1]: class -> the objects that count, with colours where asked for."""
        found: list[dict[str, list[Detection]]] = [{} for _ in tasks]
        for classes in dict.fromkeys(task.classes for task in tasks):
            rows = [i for i, task in enumerate(tasks) if task.classes == classes]
            for i, detections in zip(rows, self.detect(model["detector"], images[rows], classes), strict=True):
                threshold = self.counting_threshold if tasks[i].tag == "counting" else self.threshold
                found[i] = {
                    name: keep(some, threshold, self.max_objects, self.max_overlap) for name, some in detections.items()
                }
        for image, task, objects in zip(images, tasks, found, strict=True):
            for name in dict.fromkeys(clause.name for clause in task.include if clause.colour):
                most = max(clause.count for clause in task.include if clause.name == name and clause.colour)
                colours = self.colours(model["clip"], image, name, [d.box for d in objects[name][:most]])
                objects[name][:most] = [replace(d, colour=c) for d, c in zip(objects[name], colours, strict=False)]
        return found

    def detect(self, detector: nn.Module, images: Tensor, classes: Sequence[str]) -> list[dict[str, list[Detection]]]:
        """For each image: class -> all that the detector gives above the lower of the thresholds."""
        if detector.config.model_type != "grounding-dino":
            return self._detect(detector, images, classes, [self.query.replace("{}", name) for name in classes])
        found: list[dict[str, list[Detection]]] = [{} for _ in images]
        for name in classes:
            text = name.lower().rstrip(".") + "."
            for some, more in zip(found, self._detect(detector, images, [name], [text]), strict=True):
                some.update(more)
        return found

    def _detect(self, detector, images: Tensor, classes: Sequence[str], queries: Sequence[str]) -> list[dict]:
        from PIL import Image

        config, height, width = detector.config, *images.shape[-2:]
        dino = config.model_type == "grounding-dino"
        pixels = (images.float().clamp(0, 1) * 255).round().byte().cpu().movedim(1, -1).numpy()
        inputs = dict(self.processor.image_processor([Image.fromarray(p) for p in pixels], return_tensors="pt"))
        inputs["pixel_values"] = inputs["pixel_values"].to(detector.dtype)
        limit = config.max_text_len if dino else config.text_config.max_position_embeddings
        inputs |= self.processor.tokenizer(
            list(queries) * len(images),
            padding=dino or "max_length",
            truncation=True,
            max_length=limit,
            return_tensors="pt",
        )
        out = detector(**{name: value.to(images.device) for name, value in inputs.items()})
        # (b, boxes, classes) or, for Grounding DINO, (b, boxes, tokens of the one class).
        probabilities = out.logits.float().sigmoid()
        scores, labels = probabilities.max(-1)
        # OWLv2 pads the image to a square at the right or the bottom.
        w, h = (max(height, width),) * 2 if config.model_type == "owlv2" else (width, height)
        centre, half = (out.pred_boxes.float() * torch.tensor([w, h, w, h], device=images.device)).split(2, -1)
        boxes = torch.cat([centre - half / 2, centre + half / 2], -1)
        found = []
        for some, label, box in zip(scores, torch.zeros_like(labels) if dino else labels, boxes, strict=True):
            seen = (some > min(self.threshold, self.counting_threshold)).nonzero().flatten()
            found.append({name: [] for name in classes})
            for s, k, b in zip(some[seen].tolist(), label[seen].tolist(), box[seen].tolist(), strict=True):
                found[-1][classes[k]].append(Detection(tuple(b), s))
        return found

    def colours(self, clip: nn.Module, image: Tensor, name: str, boxes: Sequence[Sequence[float]]) -> list[str]:
        """The colour, of COLOURS, of each box of a (3, H, W) image, by zero-shot classification as an object `name`."""
        if not boxes:
            return []
        crops = [cropped(crop(image, box)[None], clip.config.vision_config.image_size) for box in boxes]
        features = clip.get_image_features(pixel_values=torch.cat(crops).to(clip.dtype))
        similarity = normalize(pooled(features).float(), dim=-1) @ self._colour_embeddings(clip, name).T
        return [COLOURS[i] for i in similarity.argmax(-1).tolist()]

    def _colour_embeddings(self, clip: nn.Module, name: str) -> Tensor:
        """(10, D) on the model's device: each the mean of its queries, of length 1."""
        known = self._kept.setdefault("colours", {})
        if name not in known:
            texts = [query.format(colour=colour, name=name) for colour in COLOURS for query in COLOUR_QUERIES]
            features = pooled(clip.get_text_features(**self.tokenize(texts, clip.device))).float()
            means = normalize(features, dim=-1).view(len(COLOURS), len(COLOUR_QUERIES), -1).mean(1)
            known[name] = normalize(means, dim=-1).cpu()
        return known[name].to(clip.device)


def crop(image: Tensor, box: Sequence[float]) -> Tensor:
    """What lies in a box (left, top, right, bottom in pixels) of a (3, H, W) image, at least LEAST_CROP a side."""
    bounds = []
    for low, high, size in ((box[1], box[3], image.shape[-2]), (box[0], box[2], image.shape[-1])):
        low, high = round(min(max(low, 0), size)), round(min(max(high, 0), size))
        length = max(high - low, min(LEAST_CROP, size))
        low = min(max((low + high - length) // 2, 0), size - length)
        bounds.append(slice(low, low + length))
    return image[:, bounds[0], bounds[1]]
