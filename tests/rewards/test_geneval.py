"""GenEval: the rules against a second implementation, the models against the pipeline and processor of transformers."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from sfgrpo.rewards import check_prompts, get_reward, mix
from sfgrpo.rewards.geneval import COLOUR_QUERIES, GenEval, crop
from sfgrpo.rewards.geneval_rules import (
    COLOURS,
    RELATIONS,
    Clause,
    Detection,
    Task,
    iou,
    judge,
    keep,
    read_task,
    relations,
)
from tests.rewards.small import images, randomise, save_bert_tokenizer, save_clip_tokenizer

# One line of each tag, of GenEval's own file.
LINES = """
{"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}
{"tag": "two_object", "include": [{"class": "parking meter", "count": 1}, {"class": "teddy bear", "count": 1}], "prompt": "a photo of a parking meter and a teddy bear"}
{"tag": "counting", "include": [{"class": "pizza", "count": 3}], "exclude": [{"class": "pizza", "count": 4}], "prompt": "a photo of three pizzas"}
{"tag": "colors", "include": [{"class": "potted plant", "count": 1, "color": "purple"}], "prompt": "a photo of a purple potted plant"}
{"tag": "position", "include": [{"class": "skateboard", "count": 1}, {"class": "bird", "count": 1, "position": ["below", 0]}], "prompt": "a photo of a bird below a skateboard"}
{"tag": "color_attr", "include": [{"class": "car", "count": 1, "color": "black"}, {"class": "parking meter", "count": 1, "color": "green"}], "prompt": "a photo of a black car and a green parking meter"}
"""  # noqa: E501
ROWS = {row["tag"]: row for row in map(json.loads, LINES.strip().splitlines())}


def at(x, y, *, size=20, score=0.9, colour=""):
    return Detection((x - size / 2, y - size / 2, x + size / 2, y + size / 2), score, colour)


def verdict(row, found):
    got = judge(read_task(row.get("prompt", "a prompt"), row), found)
    return got.strict, pytest.approx(got.soft)


def test_the_lines_of_genevals_file():
    task = read_task("p", ROWS["position"])
    assert task == Task("position", (Clause("skateboard", 1), Clause("bird", 1, relation="below", target=0)))
    assert read_task("p", ROWS["counting"]).exclude == (Clause("pizza", 4),)
    assert read_task("p", ROWS["colors"]).include[0].colour == "purple"
    assert read_task("p", ROWS["color_attr"]).classes == ("car", "parking meter")


def test_single_object():
    assert verdict(ROWS["single_object"], {}) == (0, 0)
    assert verdict(ROWS["single_object"], {"bench": [at(5, 5)]}) == (1, 1)
    assert verdict(ROWS["single_object"], {"bench": [at(5, 5), at(50, 5)], "dog": [at(9, 9)]}) == (1, 1)


def test_two_object():
    one, both = {"teddy bear": [at(5, 5)]}, {"teddy bear": [at(5, 5)], "parking meter": [at(5, 5)]}
    assert verdict(ROWS["two_object"], one) == (0, 0.5) and verdict(ROWS["two_object"], both) == (1, 1)


@pytest.mark.parametrize("n, expected", [(0, (0, 0)), (1, (0, 1 / 3)), (3, (1, 1)), (4, (0, 4 / 5)), (8, (0, 4 / 9))])
def test_counting(n, expected):
    assert verdict(ROWS["counting"], {"pizza": [at(50 * i, 0) for i in range(n)]}) == expected


def test_exclude_of_another_class():
    row = ROWS["single_object"] | {"exclude": [{"class": "dog", "count": 1}, {"class": "cat", "count": 2}]}
    bench = {"bench": [at(0, 0)]}
    assert verdict(row, bench | {"cat": [at(9, 9)]}) == (1, 1)
    assert verdict(row, bench | {"dog": [at(9, 9)]}) == (0, 1 / 2)
    assert verdict(row, bench | {"dog": [at(9, 9)] * 2, "cat": [at(9, 9)] * 2}) == (0, 1 / 3 * 2 / 3)


def test_colour_is_that_of_the_surest_objects():
    plants = [at(0, 0, colour="purple"), at(50, 0, score=0.5, colour="red")]
    assert verdict(ROWS["colors"], {"potted plant": plants}) == (1, 1)
    assert verdict(ROWS["colors"], {"potted plant": plants[::-1]}) == (0, 0.5)
    assert verdict(ROWS["colors"], {}) == (0, 0)
    two = {"tag": "colors", "include": [{"class": "cup", "count": 2, "color": "red"}]}
    assert verdict(two, {"cup": [at(0, 0, colour="red"), at(50, 0, colour="blue")]}) == (0, 0.75)
    assert verdict(two, {"cup": [at(0, 0, colour="red")]}) == (0, 0.5)


def test_colour_attribution():
    swapped = {"car": [at(0, 0, colour="green")], "parking meter": [at(9, 0, colour="black")]}
    right = {"car": [at(0, 0, colour="black")], "parking meter": [at(9, 0, colour="green")]}
    assert verdict(ROWS["color_attr"], swapped) == (0, 0.5) and verdict(ROWS["color_attr"], right) == (1, 1)


def test_position():
    board, bird = [at(50, 50)], [at(50, 150)]
    assert verdict(ROWS["position"], {"skateboard": board, "bird": bird}) == (1, 1)
    assert verdict(ROWS["position"], {"skateboard": bird, "bird": board}) == (0, 2 / 3)
    assert verdict(ROWS["position"], {"bird": board}) == (0, 1 / 3)
    # Every object against every object.
    row = {
        "tag": "position",
        "include": [{"class": "a", "count": 2}, {"class": "b", "count": 1, "position": ["above", 0]}],
    }
    assert verdict(row, {"a": [at(0, 90), at(0, 80)], "b": [at(0, 0)]}) == (1, 1)
    assert verdict(row, {"a": [at(0, 90), at(90, 0)], "b": [at(0, 0)]}) == (0, 2 / 3)


def test_a_target_of_the_wrong_colour_is_no_target():
    include = [{"class": "a", "count": 1, "color": "red"}, {"class": "b", "count": 1, "position": ["above", 0]}]
    found = {"a": [at(0, 90, colour="blue")], "b": [at(0, 0)]}
    assert verdict({"tag": "position", "include": include}, found) == (0, 2 / 4)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ((0, 0, 20, 20), (100, 0, 120, 20), {"left of"}),
        ((0, 0, 20, 20), (0, 100, 20, 120), {"above"}),
        ((100, 100, 120, 120), (0, 0, 20, 20), {"right of", "below"}),
        ((0, 0, 20, 20), (0, 0, 20, 20), set()),
        # The same centre, another size; then inside of the margin of 0.1 (20 + 20) = 4 pixels, on it and past it.
        ((5, 5, 15, 15), (0, 0, 20, 20), set()),
        ((0, 0, 20, 20), (3, 0, 23, 20), set()),
        ((0, 0, 20, 20), (4, 0, 24, 20), set()),
        ((0, 0, 20, 20), (6, 0, 26, 20), set()),
        ((0, 0, 20, 20), (9, 0, 29, 20), {"left of"}),
        # What is left must exceed half of the distance: (10 - 4) / 10 does, (8 - 4) / 8 is half of it.
        ((0, 0, 20, 20), (8, 0, 28, 20), set()),
        ((0, 0, 20, 20), (10, 0, 30, 20), {"left of"}),
        # 26.6 degrees off the axis: the short side leaves less than half.
        ((0, 0, 0, 0), (100, 50, 100, 50), {"left of"}),
        ((0, 0, 0, 0), (100, 60, 100, 60), {"left of", "above"}),
    ],
)
def test_relations(a, b, expected):
    assert relations(a, b) == expected


def test_overlap_counts_the_borders():
    assert iou((0, 0, 9, 9), (0, 0, 9, 9)) == 1
    assert iou((0, 0, 9, 9), (5, 0, 14, 9)) == pytest.approx(50 / 150)
    assert iou((0, 0, 9, 9), (10, 0, 19, 9)) == 0
    assert iou((0, 0, 0, 0), (0, 0, 0, 0)) == 1


def test_keep():
    some = [
        at(0, 0, score=0.4),
        at(2, 0, score=0.8),
        at(90, 0, score=0.3),
        at(60, 0, score=0.31),
        at(62, 0, score=0.31),
    ]
    assert keep(some, 0.3, 16, 1) == [some[1], some[0], some[3], some[4]]
    assert keep(some, 0.3, 16, 0.5) == [some[1], some[3]]
    # The limit comes before the overlap, as in GenEval.
    assert keep(some, 0.3, 2, 0.5) == [some[1]]
    assert keep(some, 0.9, 16, 0.5) == []
    # A box that only a suppressed one overlaps stays.
    chain = [at(0, 0, score=0.9), at(6, 0, score=0.8), at(12, 0, score=0.7)]
    assert keep(chain, 0, 16, 0.5) == [chain[0], chain[2]]


def reference(row, raw, threshold, counting_threshold, max_objects, max_overlap):
    """GenEval's evaluation once more, on arrays and in the order of its paper: filter, suppress, then clause by clause.

    raw: class -> (N, 5) boxes with scores, and colours. Returns strict and the list of requirements.
    """
    limit = counting_threshold if row["tag"] == "counting" else threshold
    objects = {}
    for name, (boxes, colours) in raw.items():
        order = [i for i in np.argsort(-boxes[:, 4], kind="stable") if boxes[i, 4] > limit][:max_objects]
        chosen = []
        while order:
            first, *order = order
            chosen.append(first)
            x0, y0, x1, y1 = (boxes[:, k] for k in range(4))
            w = np.clip(np.minimum(x1, x1[first]) - np.maximum(x0, x0[first]) + 1, 0, None)
            h = np.clip(np.minimum(y1, y1[first]) - np.maximum(y0, y0[first]) + 1, 0, None)
            area = (x1 - x0 + 1) * (y1 - y0 + 1)
            overlap = w * h / (area + area[first] - w * h)
            order = [i for i in order if max_overlap == 1 or overlap[i] < max_overlap]
        objects[name] = (boxes[chosen, :4], [colours[i] for i in chosen])

    correct, groups, shares = True, [], []
    for want in row["include"]:
        boxes, colours = objects.get(want["class"], (np.zeros((0, 4)), []))
        boxes, colours = boxes[: want["count"]], colours[: want["count"]]
        good = len(boxes) == want["count"]
        shares.append(len(boxes) / want["count"])
        if "color" in want:
            shares.append(colours.count(want["color"]) / want["count"])
            good = good and colours.count(want["color"]) == want["count"]
        if "position" in want:
            relation, target = want["position"]
            good = good and groups[target] is not None
            if good:
                for a, b in itertools.product(boxes, groups[target]):
                    (ax, ay), (bx, by) = (a[:2] + a[2:]) / 2, (b[:2] + b[2:]) / 2
                    dx = max(abs(ax - bx) - 0.1 * (a[2] - a[0] + b[2] - b[0]), 0)
                    dy = max(abs(ay - by) - 0.1 * (a[3] - a[1] + b[3] - b[1]), 0)
                    half = math.dist((ax, ay), (bx, by)) / 2
                    apart = dx >= 1e-3 or dy >= 1e-3
                    good = (
                        good
                        and apart
                        and {
                            "left of": dx > half and ax < bx,
                            "right of": dx > half and ax > bx,
                            "above": dy > half and ay < by,
                            "below": dy > half and ay > by,
                        }[relation]
                    )
            shares.append(float(good))
        correct = correct and good
        groups.append(boxes if good else None)
    factor = 1.0
    for want in row.get("exclude", []):
        n = len(objects.get(want["class"], ((), ()))[0])
        correct = correct and n < want["count"]
        factor *= min(1, want["count"] / (n + 1))
    return float(correct), sum(shares) / len(shares) * factor


@pytest.mark.parametrize("tag", ROWS)
def test_random_scenes_against_the_second_implementation(tag):
    rng = np.random.default_rng(list(ROWS).index(tag))
    outcomes = set()
    for _ in range(400):
        names = ["a", "b", "c"]
        include = []
        for i in range(rng.integers(1, 4)):
            want = {"class": names[rng.integers(2)], "count": int(rng.integers(1, 4))}
            if rng.random() < 0.4:
                want["color"] = COLOURS[rng.integers(2)]
            if i and rng.random() < 0.5:
                want["position"] = [RELATIONS[rng.integers(4)], int(rng.integers(i))]
            include.append(want)
        row = {"tag": tag, "include": include}
        if rng.random() < 0.4:
            row["exclude"] = [{"class": names[rng.integers(3)], "count": int(rng.integers(1, 5))}]
        raw = {}
        for name in names[: rng.integers(1, 4)]:
            n = rng.integers(1, 8)
            corner = rng.integers(0, 60, (n, 2)) * [1, 1]
            boxes = np.concatenate([corner, corner + rng.integers(4, 30, (n, 2))], 1)
            # Few levels, so that there are ties and scores on the threshold.
            raw[name] = (np.c_[boxes, rng.integers(1, 11, n) / 10], list(rng.choice(COLOURS[:2], n)))
        overlap = float(rng.choice([0.3, 0.5, 1]))
        strict, soft = reference(row, raw, 0.3, 0.9, 4, overlap)
        found = {
            name: keep(
                [Detection(tuple(b[:4].tolist()), float(b[4]), str(c)) for b, c in zip(boxes, colours, strict=True)],
                0.9 if tag == "counting" else 0.3,
                4,
                overlap,
            )
            for name, (boxes, colours) in raw.items()
        }
        got = judge(read_task("p", row), found)
        assert (got.strict, got.soft) == (strict, pytest.approx(soft)), row
        assert (got.soft == 1) == (got.strict == 1)
        outcomes.add(strict)
    assert outcomes == {0.0, 1.0}


GOOD = {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "red"}]}


@pytest.mark.parametrize(
    "metadata, field",
    [
        ({}, '"tag"'),
        (GOOD | {"tag": "colours"}, '"tag"'),
        ({"tag": "colors"}, '"include"'),
        (GOOD | {"include": []}, '"include"'),
        (GOOD | {"include": {"class": "car"}}, '"include"'),
        (GOOD | {"include": ["car"]}, r'"include"\[0\]'),
        (GOOD | {"include": [{"count": 1}]}, r'"include"\[0\]\["class"\]'),
        (GOOD | {"include": [{"class": " ", "count": 1}]}, r'"include"\[0\]\["class"\]'),
        (GOOD | {"include": [{"class": "car"}]}, r'"include"\[0\]\["count"\]'),
        (GOOD | {"include": [{"class": "car", "count": 0}]}, r'"include"\[0\]\["count"\]'),
        (GOOD | {"include": [{"class": "car", "count": True}]}, r'"include"\[0\]\["count"\]'),
        (GOOD | {"include": [{"class": "car", "count": 1, "color": "grey"}]}, r'"include"\[0\]\["color"\]'),
        (GOOD | {"include": [{"class": "car", "count": 1, "color": ["red"]}]}, r'"include"\[0\]\["color"\]'),
        (GOOD | {"include": [{"class": "car", "count": 1, "position": ["above", 0]}]}, r'"include"\[0\]\["position"\]'),
        (
            GOOD | {"include": GOOD["include"] + [{"class": "b", "count": 1, "position": "above"}]},
            r'"include"\[1\]\["position"\]',
        ),
        (
            GOOD | {"include": GOOD["include"] + [{"class": "b", "count": 1, "position": ["on", 0]}]},
            r'"include"\[1\]\["position"\]',
        ),
        (GOOD | {"exclude": [{"class": "car"}]}, r'"exclude"\[0\]\["count"\]'),
    ],
)
def test_bad_metadata_names_the_prompt_and_the_field(metadata, field):
    with pytest.raises(ValueError, match=rf"{field} of prompt 'a red car' to be .*got"):
        read_task("a red car", metadata)
    with pytest.raises(ValueError, match="of prompt 'a red car'"):
        GenEval()(torch.rand(1, 3, 8, 8), ["a red car"], [metadata])


@pytest.mark.parametrize(
    "setting, value",
    [
        ("mode", "both"),
        ("threshold", -0.1),
        ("counting_threshold", 2),
        ("max_overlap", float("nan")),
        ("max_objects", 0),
        ("position_threshold", -1),
        ("query", "a photo"),
    ],
)
def test_bad_settings_are_named(setting, value):
    with pytest.raises(ValueError, match=setting):
        GenEval(**{setting: value})


def save_owl(folder, kind="Owlv2"):
    """A small detector of the class Owlv2 or OwlViT, with its processor."""
    import transformers

    ids = save_clip_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 40}))
    width = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(
        text_config=width | ids | {"pad_token_id": ids["eos_token_id"], "max_position_embeddings": 40},
        vision_config=width | {"image_size": 48, "patch_size": 8},
        projection_dim=32,
    )
    randomise(getattr(transformers, f"{kind}ForObjectDetection")(config), 3).save_pretrained(folder)
    side = {"height": 48, "width": 48}
    processor = {"processor_class": f"{kind}Processor", "image_processor_type": f"{kind}ImageProcessor", "size": side}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"crop_size": side}))


def save_owlvit(folder):
    save_owl(folder, "OwlViT")


@pytest.fixture(scope="module")
def owlv2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("owlv2")
    save_owl(folder)
    return folder


CLASSES = ("red cat", "dog", "green hill")


def pictures(height, width, count=3):
    """The same as files would hold."""
    pixels = (images(height, width, count=count, seed=5) * 255).round().byte()
    return [Image.fromarray(x.movedim(0, -1).numpy()) for x in pixels]


@pytest.mark.parametrize("size", [(48, 48), (40, 72), (90, 50)])
def test_detections_are_those_of_transformers(owlv2, clip_folder, size):
    from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor, pipeline

    reward = GenEval(model=str(owlv2), clip=str(clip_folder), threshold=0.2, device="cpu")
    detector = reward._ready()[1]["detector"]
    with torch.no_grad():
        found = reward.detect(detector, images(*size, count=3, seed=5), CLASSES)
        alone = reward.detect(detector, images(*size, count=3, seed=5), CLASSES[1:2])
    processor = AutoProcessor.from_pretrained(owlv2)
    model = AutoModelForZeroShotObjectDetection.from_pretrained(owlv2).eval()
    queries = [f"a photo of a {name}" for name in CLASSES]
    pipe = pipeline(
        "zero-shot-object-detection",
        model=model,
        tokenizer=processor.tokenizer,
        image_processor=processor.image_processor,
        processor=processor,
    )
    names = set()
    for picture, got, single in zip(pictures(*size), found, alone, strict=True):
        with torch.no_grad():
            out = model(**processor(images=picture, text=[queries], return_tensors="pt"))
        [want] = processor.post_process_grounded_object_detection(out, threshold=0.2, target_sizes=[size])
        assert list(got) == list(CLASSES)
        for k, name in enumerate(CLASSES):
            mine = want["labels"] == k
            boxes = torch.tensor([d.box for d in got[name]]).reshape(-1, 4)
            torch.testing.assert_close(boxes, want["boxes"][mine], rtol=1e-4, atol=1e-2)
            scores = torch.tensor([d.score for d in got[name]])
            torch.testing.assert_close(scores, want["scores"][mine], rtol=1e-3, atol=1e-4)
            names |= {name} if got[name] else set()
        # The pipeline asks for one class at a time.
        listed = pipe(picture, candidate_labels=queries[1:2], threshold=0.2)
        mine = sorted(single[CLASSES[1]], key=lambda d: -d.score)
        assert len(listed) == len(mine) > 3
        for one, detection in zip(listed, mine, strict=True):
            assert one["score"] == pytest.approx(detection.score, abs=1e-4)
            box = [one["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")]
            assert box == pytest.approx(detection.box, abs=1.01)
    assert len(names) > 1


def save_grounding_dino(folder):
    from transformers import (
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        SwinConfig,
    )

    vocabulary = save_bert_tokenizer(folder)
    swin = SwinConfig(
        window_size=7,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        image_size=64,
        out_features=["stage2", "stage3", "stage4"],
        out_indices=[2, 3, 4],
    )
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = GroundingDinoConfig(
        backbone_config=swin,
        text_config=text | {"model_type": "bert", "vocab_size": vocabulary, "max_position_embeddings": 32},
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=12,
        num_feature_levels=4,
        encoder_n_points=2,
        decoder_n_points=2,
        max_text_len=24,
    )
    randomise(GroundingDinoForObjectDetection(config), 4, std=0.1).save_pretrained(folder)
    processor = {"processor_class": "GroundingDinoProcessor", "image_processor_type": "GroundingDinoImageProcessor"}
    processor |= {"size": {"shortest_edge": 64, "longest_edge": 96}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@pytest.mark.parametrize("save", [save_owlvit, save_grounding_dino])
def test_other_detectors(save, clip_folder, tmp_path):
    from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

    save(tmp_path)
    dino, size, names = save is save_grounding_dino, (40, 72), ("cat", "dog")
    processor = AutoProcessor.from_pretrained(tmp_path)
    model = AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path).eval()

    def detect(picture):
        """class -> boxes and scores, by the processor alone."""
        asked = [["cat"], ["dog"]] if dino else [["a photo of a cat", "a photo of a dog"]]
        found = {}
        for k, text in enumerate(asked):
            inputs = processor(images=picture, text=[f"{text[0]}."] if dino else [text], return_tensors="pt")
            with torch.no_grad():
                out = model(**inputs)
            extra = {"input_ids": inputs["input_ids"], "text_threshold": 0.1} if dino else {}
            [got] = processor.post_process_grounded_object_detection(out, threshold=0, target_sizes=[size], **extra)
            for j in range(len(text)):
                mine = torch.full_like(got["scores"], True).bool() if dino else got["labels"] == j
                found[names[k + j]] = (got["boxes"][mine], got["scores"][mine])
        return found

    reward = GenEval(model=str(tmp_path), clip=str(clip_folder), threshold=0, device="cpu")
    with torch.no_grad():
        found = reward.detect(reward._ready()[1]["detector"], images(*size, count=2, seed=5), names)
    for picture, got in zip(pictures(*size, count=2), found, strict=True):
        want = detect(picture)
        assert sum(len(some) for some in got.values()) >= 12
        for name in names:
            boxes = torch.tensor([d.box for d in got[name]]).reshape(-1, 4)
            torch.testing.assert_close(boxes, want[name][0], rtol=1e-3, atol=1e-2)
            torch.testing.assert_close(torch.tensor([d.score for d in got[name]]), want[name][1], rtol=1e-3, atol=1e-4)


def colours_of(folder, picture, boxes, name):
    """The colour of each box of a picture, by CLIPModel and its own processor, one query at a time."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    size = model.config.vision_config.image_size
    processor = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    templates = [f"a photo of a {{}} {name}", f"a photo of a {{}}-colored {name}", "a photo of a {} object"]
    assert [q.format(colour="{}", name=name) for q in COLOUR_QUERIES] == templates

    def embed(x):
        vector = (x if isinstance(x, torch.Tensor) else x.pooler_output)[0]
        return vector / vector.norm()

    names, margins = [], []
    with torch.no_grad():
        texts = []
        for colour in COLOURS:
            parts = []
            for t in templates:
                ids = tokenizer([t.format(colour)], truncation=True, max_length=24, return_tensors="pt")
                parts.append(embed(model.get_text_features(**ids)))
            mean = sum(parts) / 3
            texts.append(mean / mean.norm())
        for box in boxes:
            pixels = processor([picture.crop(tuple(map(round, box)))], return_tensors="pt")["pixel_values"]
            cosine = torch.stack(texts) @ embed(model.get_image_features(pixel_values=pixels))
            names.append(COLOURS[int(cosine.argmax())])
            margins.append(float(cosine.topk(2).values.diff().abs()))
    return names, margins


def test_colours_are_those_of_clip(owlv2, clip_folder):
    reward = GenEval(model=str(owlv2), clip=str(clip_folder), device="cpu")
    clip = reward._ready()[1]["clip"]
    boxes = [(0, 0, 40, 40), (10.4, 3.6, 70.2, 39.7), (30, 0, 50, 40), (0, 20, 72, 40), (44, 8, 70, 30)]
    seen, compared = set(), 0
    for image, picture in zip(images(40, 72, seed=5), pictures(40, 72, count=5), strict=True):
        with torch.no_grad():
            got = reward.colours(clip, image, "cat", boxes)
        want, margins = colours_of(clip_folder, picture, boxes, "cat")
        # Resizing may be off by a level, which can turn what is nearly a tie.
        clear = [i for i, margin in enumerate(margins) if margin > 2e-3]
        assert [got[i] for i in clear] == [want[i] for i in clear]
        seen |= {want[i] for i in clear}
        compared += len(clear)
    assert len(seen) > 1 and compared > 15
    assert reward.colours(clip, image, "cat", []) == []


def test_crop():
    image = torch.arange(3 * 40 * 60, dtype=torch.float32).view(3, 40, 60)
    torch.testing.assert_close(crop(image, (3.4, 5.6, 33.5, 39.2)), image[:, 6:39, 3:34])
    torch.testing.assert_close(crop(image, (-9, -9, 99, 99)), image)
    # Thin boxes are widened about their middle, and stay inside.
    torch.testing.assert_close(crop(image, (20, 10, 22, 30)), image[:, 10:30, 13:29])
    torch.testing.assert_close(crop(image, (0, 10, 1, 30)), image[:, 10:30, 0:16])
    torch.testing.assert_close(crop(image, (70, 50, 90, 60)), image[:, 24:40, 44:60])
    assert crop(image[:, :9, :7], (2, 2, 2, 2)).shape == (3, 9, 7)


def test_scores_end_to_end(owlv2, clip_folder):
    """Six images, three prompts, in batches that cut across them: against rules and models taken one by one."""
    size = (40, 72)
    batch = images(*size, count=6, seed=5)
    rows = [
        {"tag": "two_object", "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 5}]},
        {"tag": "counting", "include": [{"class": "dog", "count": 1}], "exclude": [{"class": "dog", "count": 2}]},
        {"tag": "colors", "include": [{"class": "cat", "count": 2, "color": "yellow"}]},
    ] * 2
    settings = {"model": str(owlv2), "clip": str(clip_folder), "device": "cpu", "batch_size": 4}
    settings |= {"threshold": 0.1, "counting_threshold": 0.4, "max_overlap": 0.2, "max_objects": 5}
    soft, strict = (get_reward("geneval", mode=mode, **settings)(batch, ["p"] * 6, rows) for mode in ("soft", "strict"))
    reward = GenEval(**settings)
    model = reward._ready()[1]
    for i, row in enumerate(rows):
        names = list(dict.fromkeys(want["class"] for want in row["include"]))
        raw = {}
        with torch.no_grad():
            [found] = reward.detect(model["detector"], batch[i : i + 1], names)
            for name, some in found.items():
                if some:
                    boxes = np.array([[*d.box, d.score] for d in some])
                    raw[name] = (boxes, reward.colours(model["clip"], batch[i], name, boxes[:, :4].tolist()))
        want = reference(row, raw, 0.1, 0.4, 5, 0.2)
        assert (float(strict[i]), float(soft[i])) == (want[0], pytest.approx(want[1])), i
    assert soft.dtype == torch.float32 and soft.shape == (6,) and len(set(soft.tolist())) > 2, soft


def test_in_bf16_on_the_offload_path(owlv2, clip_folder):
    row = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]}
    settings = {"model": str(owlv2), "clip": str(clip_folder), "device": "cpu", "threshold": 0.1}
    scores = GenEval(**settings, dtype="bf16", offload=True)(images(40, 72), ["p"] * 5, [row] * 5)
    assert scores.dtype == torch.float32 and set(scores.tolist()) <= {0.0, 0.5, 1.0}


def test_a_broken_picture_has_no_score(owlv2, clip_folder):
    batch = images(40, 72, count=2)
    batch[1, 0, 0, 0] = torch.nan
    reward = GenEval(model=str(owlv2), clip=str(clip_folder), device="cpu", threshold=0.1)
    scores = reward(batch, ["p"] * 2, [ROWS["single_object"]] * 2)
    assert scores[0] == 1 and scores[1].isnan()


def test_before_a_run(owlv2, clip_folder):
    from sfgrpo.prompts import Prompt

    score = mix({"geneval": {"model": str(owlv2), "clip": str(clip_folder), "device": "cpu"}})
    prompts = [Prompt(row["prompt"], metadata={k: v for k, v in row.items() if k != "prompt"}) for row in ROWS.values()]
    check_prompts(score, prompts, (64, 64))
    with pytest.raises(ValueError, match="\"tag\" of prompt 'a cat' to be one of single_object, .* got None"):
        check_prompts(score, [*prompts, Prompt("a cat")], (64, 64))


def test_models_that_are_none_are_named(owlv2, clip_folder, tmp_path):
    with pytest.raises(ValueError, match=r"model .* is a model of type clip; a owlv2 model is needed"):
        GenEval(model=str(clip_folder), clip=str(clip_folder)).check()
    with pytest.raises(ValueError, match=r"clip .* is a model of type owlv2"):
        GenEval(model=str(owlv2), clip=str(owlv2)).check()
    with pytest.raises(ValueError, match=r"folder .* \(clip\) does not exist"):
        GenEval(model=str(owlv2), clip=str(tmp_path / "none")).check()


def test_free_lets_the_models_go(owlv2, clip_folder):
    reward = GenEval(model=str(owlv2), clip=str(clip_folder), device="cpu", threshold=0.1)
    row = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]}
    first = reward(images(40, 72), ["p"] * 5, [row] * 5)
    reward.free()
    assert not reward._kept
    assert torch.equal(first, reward(images(40, 72), ["p"] * 5, [row] * 5))
