from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from sfgrpo.rewards.ocr import OCR, credit, normalise, quoted, reading_order, targets


@pytest.mark.parametrize(
    "prompt, strings",
    [
        ('a sign "STOP" and a wall that says "Go on!"', ["STOP", "Go on!"]),
        ("it's the dog's sign 'STOP'", ["STOP"]),
        ("the dogs' bowl says 'don't'", ["don't"]),
        ("a ‘don’t walk’ sign", ["don’t walk"]),
        ("the '90s, rock 'n' roll and rock'n'roll", []),
        ('a 5" tablet and a 7" phone', []),
        ('a 5" sign "ROOM 5"', ["ROOM 5"]),
        ("„Hallo“ und „Welt“", ["Hallo", "Welt"]),
        ("„Witaj” i “Hi”", ["Witaj", "Hi"]),
        ("« OUVERT » et «B»", ["OUVERT", "B"]),
        ("»A« und »B«", ["A", "B"]),
        ("写着“你好”", ["你好"]),
        ("看板「こんにちは」と『A』", ["こんにちは", "A"]),
        ("a “sign” beside the 'other'", ["sign"]),
        ('an empty "" sign', []),
    ],
)
def test_quoted(prompt, strings):
    assert quoted(prompt) == strings


def test_text_comes_from_the_metadata_first():
    assert targets('a "sign"', {"text": "Open"}) == ["Open"]
    assert targets("a sign", {"text": ["Open", "24/7"]}) == ["Open", "24/7"]
    assert targets('a "sign"', {"tag": "x"}) == ["sign"]


@pytest.mark.parametrize("text", ["", " ", [], ["a", ""], 5, ["a", 5]])
def test_bad_text_names_the_prompt(text):
    with pytest.raises(ValueError, match="a blue sign"):
        targets("a blue sign", {"text": text})


def test_prompt_without_text_is_named():
    grey = torch.full((1, 3, 64, 64), 0.5)
    with pytest.raises(ValueError, match="no text to read in prompt 'a blue sign'; put the text in quotation marks"):
        OCR()(grey, ["a blue sign"], [{}])


def test_normalise():
    assert normalise("  Two \n words ") == "two words"
    assert normalise("Ｆｕｌｌ ﬁt e\u0301") == "full fit é"
    assert normalise("STRASSE") == normalise("Straße")
    assert normalise("Straße", case=True) == "Straße"
    assert normalise("it’s “so” – yes") == 'it\'s "so" - yes'
    assert normalise("你好 世界 2026 ok go") == "你好世界2026 ok go"


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


def test_similarity_against_the_edit_distance_written_out():
    pytest.importorskip("rapidfuzz")
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = ("".join(rng.choice(list("abcé"), rng.integers(1, 9))) for _ in range(2))
        assert credit([b], [a]) == pytest.approx(1 - distance(a, b) / max(len(a), len(b)))
    assert credit([], ["abc"]) == 0


def test_credit_of_one_string_counts_all_that_was_read():
    pytest.importorskip("rapidfuzz")
    assert credit(["Grand", "Opening"], ["grand opening"]) == 1
    assert credit(["Grand", "Opening"], ["Grand"]) == pytest.approx(5 / 13)
    assert credit(["open"], ["OPEN"], case=True) == 0
    assert credit(["opem"], ["open"], "exact") == 0 and credit(["Open"], ["open"], "exact") == 1
    assert credit(["we are open now"], ["open"], "substring") == 1
    assert credit(["opem"], ["open"], "substring") == pytest.approx(0.75)
    assert credit([], ["open"], "substring") == credit([], ["open"], "exact") == 0


def test_credit_of_several_strings_is_the_mean_of_the_best_run_of_each():
    pytest.importorskip("rapidfuzz")
    lines = ["Grand", "Opening", "Sale"]
    assert credit(lines, ["sale", "grand opening"]) == 1
    assert credit(lines, ["sale", "grand opening"], "exact") == 1
    assert credit(lines, ["sale", "opening grand"], "exact") == 0.5
    assert credit(lines, ["sale", "xyz"]) == pytest.approx(0.5)
    assert credit(lines, ["ale", "open"], "substring") == 1
    assert credit([], ["a", "b"]) == 0


def test_reading_order():
    def box(x, y, w, h):
        return [[x, y], [x + w, y], [x + w, y + h], [x, y + h]]

    # The second of the first row is taller, so that its top lies higher; the third row leans.
    boxes = np.array(
        [box(90, 5, 60, 40), box(10, 15, 60, 22), box(80, 70, 50, 20), box(10, 62, 50, 20), box(5, 100, 9, 9)]
    )
    assert reading_order(boxes) == [1, 0, 3, 2, 4]


@pytest.mark.parametrize(
    "setting, value",
    [
        ("match", "fuzzy"),
        ("min_confidence", 1.5),
        ("detect_side", 0),
        ("threads", -1),
        ("model", "/nowhere/model.onnx"),
    ],
)
def test_bad_settings_are_named(setting, value):
    with pytest.raises(ValueError, match=setting):
        OCR(**{setting: value})


def test_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rapidocr", None)
    with pytest.raises(ValueError, match=r"needs rapidocr .*pip install \"rapidocr"):
        OCR()(torch.rand(1, 3, 64, 64), ['a "sign"'], [{}])
    with pytest.raises(ValueError, match="needs rapidocr"):
        OCR().check()


def dejavu():
    matplotlib = pytest.importorskip("matplotlib")
    return Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


def japanese():
    """The font of matplotlib-fontja, which is not imported: that would change the settings of matplotlib."""
    spec = find_spec("matplotlib_fontja")
    if spec is None:
        pytest.skip("matplotlib-fontja is not installed")
    return Path(spec.origin).parent / "fonts" / "ipaexg.ttf"


def draw(*texts, side=256, size=32, font=None):
    """A (3, side, side) picture of (x, y, text)s."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (side, side), (235, 230, 215))
    pen = ImageDraw.Draw(picture)
    for x, y, text in texts:
        pen.text((x, y), text, fill=(30, 20, 60), font=ImageFont.truetype(str(font or dejavu()), size))
    return torch.from_numpy(np.array(picture)).movedim(-1, 0).float() / 255


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("rapidocr", reason="rapidocr is not installed")
    return OCR(detect_side=320)


def test_rendered_text(reward):
    hello = draw((20, 40, "Hello World"))
    blank = torch.full((3, 256, 256), 0.5)
    noise = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(0))
    images = torch.stack([hello, hello, blank, noise])
    prompts = ['a sign "Hello World"', 'a sign "Quick brown fox"', 'a sign "Hello World"', 'a sign "Hello World"']
    scores = reward(images, prompts, [{}] * 4)
    assert scores.shape == (4,) and scores.dtype == torch.float32
    assert scores[0] > 0.9 and scores[1] < 0.4 and scores[2] == 0 and scores[3] == 0
    assert reward(images[:1], ["a sign"], [{"text": "Hello World"}]) == scores[0]


def test_a_broken_picture_has_no_score(reward):
    images = draw((20, 40, "Hello World"))[None].repeat(2, 1, 1, 1)
    images[1, 0, 0, 0] = torch.nan
    scores = reward(images, ['"Hello World"'] * 2, [{}] * 2)
    assert scores[0] > 0.9 and scores[1].isnan()


def test_default_settings():
    pytest.importorskip("rapidocr", reason="rapidocr is not installed")
    assert OCR()(draw((5, 30, "OPEN 24/7"), side=128, size=16)[None], ['"Open 24/7"'], [{}]) > 0.9


def test_case_and_match(reward):
    from dataclasses import replace

    image = draw((20, 40, "HELLO now"))[None]
    assert reward(image, ['"hello now"'], [{}]) == 1
    assert replace(reward, case=True)(image, ['"hello now"'], [{}]) < 0.5
    assert replace(reward, match="exact")(image, ['"hello"'], [{}]) == 0
    assert replace(reward, match="substring")(image, ['"hello"'], [{}]) == 1


def test_rows_are_read_in_order(reward):
    image = draw((20, 60, "yes"), (130, 60, "Egg"), (20, 150, "third"), size=44)[None]
    assert reward(image, ['"yes Egg third"'], [{}]) > 0.9


def test_several_strings(reward):
    image = draw((20, 40, "Grand Opening"), (60, 150, "Sale"), size=28)[None]
    assert reward(image, ['a "Sale" at the "Grand Opening"'], [{}]) > 0.9
    assert 0.4 < reward(image, ['a "Sale" beside "XYZ 123 QQQ"'], [{}]) < 0.7


def test_small_pictures_are_enlarged(reward):
    assert reward(draw((4, 20, "OPEN"), side=64, size=16)[None], ['"OPEN"'], [{}]) > 0.9


def test_accents(reward):
    image = draw((8, 40, "Crème brûlée"), (8, 90, "Grüße aus Köln"), (8, 140, "señor Łukasz"), side=288, size=28)[None]
    assert reward(image, ['"Crème brûlée Grüße aus Köln señor Łukasz"'], [{}]) > 0.9
    decomposed = "Cre\u0300me bru\u0302le\u0301e"
    assert reward(image, ["a menu"], [{"text": [decomposed, "Grüße aus Köln"]}]) > 0.9


def test_chinese_and_japanese(reward):
    image = draw((20, 40, "こんにちは世界"), (20, 130, "営業中 2026"), size=28, font=japanese())[None]
    assert reward(image, ["看板「こんにちは世界」と「営業中2026」"], [{}]) > 0.9
    assert reward(image, ["看板「さようなら」"], [{}]) < 0.4


def test_letters_that_the_model_does_not_know_are_named(reward):
    grey = torch.full((1, 3, 64, 64), 0.5)
    with pytest.raises(ValueError, match="does not know П в е и р т of prompt 'a sign “Привет”'.*set `model`"):
        reward(grey, ["a sign “Привет”"], [{}])
    with pytest.raises(ValueError, match="does not know П"):
        reward.check_prompt("a sign “Привет”", {}, (64, 64))


def test_before_a_run(reward):
    reward.check()
    reward.check_prompt('a "sign"', {}, (64, 64))
    with pytest.raises(ValueError, match="no text to read"):
        reward.check_prompt("a sign", {}, (64, 64))


def test_models_are_loaded_again_after_free(reward):
    image = draw((20, 40, "Hello"))[None]
    assert reward(image, ['"Hello"'], [{}]) == 1
    reward.free()
    assert "_engine" not in vars(reward)
    assert reward(image, ['"Hello"'], [{}]) == 1


def test_another_recogniser(reward):
    import rapidocr

    [own] = Path(rapidocr.__file__).parent.glob("models/*rec*.onnx")
    other = OCR(model=str(own), detect_side=320, threads=1)
    assert other(draw((20, 40, "Hello"))[None], ['"Hello"'], [{}]) == 1
