"""The judge: what a server is asked, how answers become numbers, and what becomes of answers that are none."""

import base64
import io
import json
import logging
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from sfgrpo.rewards import get_reward, read_term
from sfgrpo.rewards.server import ServerError
from sfgrpo.rewards.vlm_answers import NoScore, from_json, from_tokens, from_words
from sfgrpo.rewards.vlm_prompts import ANY_SCORE, PRESETS, check_template, fill_in
from tests.rewards.loopback import cut, hang, say, serving

IMAGES = (torch.arange(4 * 3 * 6 * 5).reshape(4, 3, 6, 5) % 256) / 255
PROMPTS = ["a cat", "two {dogs} {prompt} {}", "{count}", 'a "red" hill\\n']


def chat(text, tokens=None, finish="stop"):
    """An answer as vLLM and others give it; tokens: (token, {alternative: logprob})."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if tokens is not None:
        content = [
            {"token": t, "logprob": -0.1, "top_logprobs": [{"token": a, "logprob": p} for a, p in top.items()]}
            for t, top in tokens
        ]
        choice["logprobs"] = {"content": content}
    return say({"id": "1", "object": "chat.completion", "choices": [choice]})


def judge(server, **settings):
    return get_reward("vlm_judge", url=server.url, **({"model": "m", "backoff": 0.0, "timeout": 10} | settings))


def ask(server, count=4, **settings):
    return judge(server, **settings)(IMAGES[:count], PROMPTS[:count], [{}] * count)


def test_what_is_asked(monkeypatch):
    monkeypatch.setenv("SFGRPO_TEST_KEY", "key-1")
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    with serving(chat("Score: 7")) as server:
        settings = {"template": "{prompt}|{count}|{tags}|{x:1}".replace("{x:1}", '{"a": 1}'), "max_tokens": 17}
        reward = judge(server, token_env="SFGRPO_TEST_KEY", extra=extra, concurrency=1, **settings)
        metadata = [{"count": n, "tags": ["ä", {"b": None}]} for n in range(4)]
        reward.check()
        reward.check_prompt(PROMPTS[1], metadata[1], (6, 5))
        assert server.asked == []
        scores = reward(IMAGES, PROMPTS, metadata)
        torch.testing.assert_close(scores, torch.full((4,), 6 / 9), rtol=0, atol=1e-7)
        assert [a.path for a in server.asked] == ["/v1/chat/completions"] * 4
        for image, prompt, n, asked in zip(IMAGES, PROMPTS, range(4), server.asked, strict=True):
            assert asked.headers["Authorization"] == "Bearer key-1"
            body = asked.json
            (message,) = body.pop("messages")
            assert body == {"model": "m", "max_tokens": 17, "temperature": 0.0, **extra}
            picture, text = message["content"]
            assert message["role"] == "user" and text["type"] == "text" and picture["type"] == "image_url"
            assert text["text"] == f'{prompt}|{n}|["ä", {{"b": null}}]|{{"a": 1}}'
            kind, data = picture["image_url"]["url"].split(",")
            assert kind == "data:image/png;base64"
            pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
            assert np.array_equal(pixels, (image * 255).round().byte().movedim(0, -1).numpy())


def test_jpeg_and_the_paths_of_urls():
    with serving(chat("Score: 1")) as server:
        assert ask(server, count=1, image_format="jpeg").tolist() == [0.0]
        data = server.asked[0].json["messages"][0]["content"][0]["image_url"]["url"]
        assert Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/jpeg;base64,")))).format == "JPEG"
        for end in ("/v1", "/v1/", "/prefix"):
            get_reward("vlm_judge", url=server.url + end, model="m")(IMAGES[:1], PROMPTS[:1], [{}])
        wanted = ["/v1/chat/completions"] * 3 + ["/prefix/v1/chat/completions"]
        assert [a.path for a in server.asked] == wanted


def test_scores_stay_with_their_images_however_many_are_asked_at_once():
    def first_pixel(handler, asked):
        data = asked.json["messages"][0]["content"][0]["image_url"]["url"].split(",")[1]
        pixel = int(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[0, 0, 0])
        chat(f"It is dim.\nScore: {pixel}")(handler, asked)

    levels = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    images = (levels.float() / 255).view(40, 1, 1, 1).expand(40, 3, 2, 2)
    with serving(first_pixel) as server:
        for concurrency in (1, 7, 64):
            server.asked.clear()
            scores = judge(server, lowest=0.0, highest=255.0, concurrency=concurrency)(images, ["x"] * 40, [{}] * 40)
            torch.testing.assert_close(scores, levels / 255, rtol=0, atol=1e-7)
            assert len(server.asked) == 40


WORDS = {
    "plain": ("Score: 7", 7),
    "bold": ("The hat is blue.\n\n**Score:** 7/10", 7),
    "fraction": ("score = 7.25", 7.25),
    "sentence": ("My score is 7.", 7),
    "alone": (" 7 ", 7),
    "alone of ten": ("**7 / 10**", 7),
    "the last": ("Score: 3? No.\nScore: 8", 8),
    "range before": ("Score (1-10): 7", 7),
    "JSON": ('{"score": 7}', 7),
    "negative": ("Score: -1", -1),
    "range alone": ("Score: 1-10", None),
    "range of words": ("Score on a scale of 1 to 10: seven", None),
    "not applicable": ("Score (1-10): N/A", None),
    "other numbers": ("There are 3 cats and 4 dogs.", None),
    "words": ("I cannot rate this.", None),
    "empty": ("", None),
}


@pytest.mark.parametrize(("text", "number"), WORDS.values(), ids=WORDS)
def test_numbers_in_words(text, number):
    if number is None:
        with pytest.raises(NoScore, match="no score in the model's answer"):
            from_words(text, (ANY_SCORE,), -10, 10)
    else:
        assert from_words(text, (ANY_SCORE,), -10, 10) == pytest.approx((number + 10) / 20)


def test_numbers_outside_the_range_are_no_scores():
    assert [from_words(f"Score: {n}", (ANY_SCORE,), 1, 5) for n in (1, 2, 5)] == [0.0, 0.25, 1.0]
    for n in (0, 5.01, 50):
        with pytest.raises(NoScore, match=f"{n} is not from 1 to 5"):
            from_words(f"Score: {n}", (ANY_SCORE,), 1, 5)
    with pytest.raises(NoScore, match="'good' is no number"):
        from_words("grade good", (r"grade (\w+)",), 1, 5)
    assert from_words("grade 4 of 9", (r"\d",), 0, 10) == 0.9
    assert from_words("a2 b4", (r"a(\d)", r"b(\d)"), 0, 10) == pytest.approx(0.3)


def test_numbers_in_json():
    assert from_json('```json\n{"why": "{odd}", "score": 7.5}\n```', "score", 0, 10) == 0.75
    assert from_json('{"score": "3"} then {"score": 4, "parts": {"score": 9}}', "score", 0, 10) == 0.4
    assert from_json('{"x": {"score": 9}} {broken {"score": 2}', "score", 0, 10) == 0.2
    for text in ("7", '{"rating": 7}', '{"score": null}', '{"score": true}', '{"score": [7]}', '{"score": 7'):
        with pytest.raises(NoScore, match="no JSON object with a number 'score'"):
            from_json(text, "score", 0, 10)
    with pytest.raises(NoScore, match="11 is not from 0 to 10"):
        from_json('{"score": 11}', "score", 0, 10)


def place(said, **alternatives):
    return {"token": said, "top_logprobs": [{"token": a, "logprob": p} for a, p in alternatives.items()]}


def test_probabilities_of_tokens():
    log = math.log
    yes_no = {"yes": 1.0, "no": 0.0}
    answer = {" Yes": log(0.4), "yes": log(0.1), "No": log(0.2), "▁no": log(0.05), "The": log(0.2)}
    tokens = [place("\n", Yes=log(0.99)), place(" Yes", **answer), place("No", No=0.0)]
    assert from_tokens(tokens, yes_no, "") == pytest.approx(0.5 / 0.75)
    assert from_tokens([place("No", No=-1e-9, The=-30.0)], yes_no, "") == 0.0
    twice = {"token": "yes", "top_logprobs": [{"token": t, "logprob": log(0.25)} for t in ("yes", "yes", "no")]}
    assert from_tokens([twice], yes_no, "") == pytest.approx(2 / 3)
    digits = {str(n): (n - 1) / 4 for n in range(1, 6)}
    tokens = [place("4", **{"5": log(0.25), "4": log(0.5), "3": log(0.15), "44": log(0.05), "x": log(0.05)})]
    wanted = (0.25 * 1.0 + 0.5 * 0.75 + 0.15 * 0.5) / 0.9
    assert from_tokens(tokens, digits, "") == pytest.approx(wanted)
    for said in ("There", "Not", "9"):
        with pytest.raises(NoScore, match="begins with none of yes, no"):
            from_tokens([place(said, yes=log(0.3)), place("yes", yes=0.0)], yes_no, said)
    for tokens in (None, [{"token": "yes"}], [{"token": "yes", "top_logprobs": None}], ["yes"], [-0.1]):
        with pytest.raises(ValueError, match="no logprobs with top_logprobs; the server must give them"):
            from_tokens(tokens, yes_no, "yes")


def test_probabilities_as_a_server_gives_them():
    yes = {"Yes": math.log(0.6), "No": math.log(0.2), "It": math.log(0.2)}
    four = {str(n): math.log(p) for n, p in zip(range(1, 6), (0.1, 0.1, 0.2, 0.4, 0.2), strict=True)}
    with serving(chat("Yes.", [("Yes", yes), (".", {".": 0.0})])) as server:
        assert ask(server, preset="yes_no").tolist() == pytest.approx([0.75] * 4)
        body = server.asked[0].json
        assert (body["logprobs"], body["top_logprobs"], body["temperature"]) == (True, 20, 0.0)
    with serving(chat("4", [("4", four)])) as server:
        expected = sum(p * (n - 1) / 4 for n, p in zip(range(1, 6), (0.1, 0.1, 0.2, 0.4, 0.2), strict=True))
        assert ask(server, preset="digits").tolist() == pytest.approx([expected] * 4)
    with serving(chat("Yes")) as server:
        with pytest.raises(ServerError, match="no logprobs with top_logprobs"):
            ask(server, count=1, preset="yes_no", retries=0)


UNIFIED = """cat (animal): 1
red (color): 0
Final Score: 3.5"""


def test_unified_reward():
    caption = "a [red] cat"
    with serving(chat(UNIFIED)) as server:
        assert judge(server, preset="unified_reward")(IMAGES[:1], [caption], [{}]).tolist() == [0.625]
        scaled = judge(server, preset="unified_reward", lowest=0, highest=5)
        assert scaled(IMAGES[:1], [caption], [{}]).tolist() == pytest.approx([0.7])
        text = server.asked[0].json["messages"][0]["content"][1]["text"]
    lines = text.split("\n")
    assert lines[0].startswith("You are given a text caption and a generated image based on that caption.")
    assert [line[:3] for line in lines[1:4]] == ["1. ", "2. ", "Ext"]
    assert lines[3].endswith("value=1 means generated), and assign a score from 1 to 5 after 'Final Score:'.")
    assert lines[4:] == ["Your task is provided as follows:", "Text Caption: [a [red] cat]"]
    example = "Alignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.371500015258789\nStyle Score (1-5): "
    with serving(chat(example + "2.802500009536743")) as server:
        mean = (2.694700002670288 + 2.371500015258789 + 2.802500009536743) / 3
        assert ask(server, preset="unified_reward_2").tolist() == pytest.approx([(mean - 1) / 4] * 4)
        style = ask(server, preset="unified_reward_2", pattern=r"Style Score \(1-5\): ([\d.]+)")
        assert style.tolist() == pytest.approx([(2.802500009536743 - 1) / 4] * 4)


def test_an_answer_without_a_score_is_asked_again_and_then_nan(caplog):
    refusal = chat("I cannot help with that.")
    with caplog.at_level(logging.ERROR), serving(refusal, refusal, chat("Score: 10")) as server:
        assert ask(server, count=1, retries=2).tolist() == [1.0]
        assert len(server.asked) == 3 and caplog.text == ""
    with caplog.at_level(logging.ERROR), serving(refusal) as server:
        assert ask(server, count=3, retries=1).isnan().all()
        assert len(server.asked) == 6
    assert "3 of 3 images have no score" in caplog.text and "'I cannot help with that.'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR), serving(chat("The hat is", finish="length")) as server:
        assert ask(server, count=1, retries=0).isnan().all()
    assert "which was cut off; raise max_tokens" in caplog.text
    for empty in (None, ""):
        with serving(chat(empty)) as server:
            assert ask(server, count=1, retries=0).isnan().all()


def test_one_image_that_fails_costs_no_other(caplog):
    def long_prompts_fail(handler, asked):
        text = asked.json["messages"][0]["content"][1]["text"]
        bad = say({"error": {"message": "the prompt is too long", "code": 400}}, 400)
        (bad if "long" in text else chat("Score: 10"))(handler, asked)

    with caplog.at_level(logging.ERROR), serving(long_prompts_fail) as server:
        scores = judge(server, concurrency=1)(IMAGES, ["a", "long", "b", "c"], [{}] * 4)
        torch.testing.assert_close(scores, torch.tensor([1, math.nan, 1, 1]), equal_nan=True)
        assert len(server.asked) == 4
    assert "1 of 4 images have no score" in caplog.text and "the prompt is too long" in caplog.text


TROUBLE = {
    "slow": (hang, {"timeout": 0.1}, "no answer within 0.1 s"),
    "500": (say("oops", 500), {}, "status 500"),
    "429": (say({"error": {"message": "rate"}}, 429, Retry_After="0"), {"backoff": 1000.0}, "status 429 .rate."),
    "truncated JSON": (say('{"choices": [{"mess'), {}, "not JSON but"),
    "cut off": (cut(b'{"choices"'), {}, "cut off"),
    "HTML": (say("<html>sign in</html>"), {}, "not JSON but '<html>sign in</html>'"),
    "not UTF-8": (say(b'{"choices": "\xff"}'), {}, "not UTF-8"),
    "no choices": (say({"choices": []}), {}, "no choices with a message"),
    "no message": (say({"choices": [{"text": "Score: 7"}]}), {}, "no choices with a message"),
    "no text": (say({"choices": [{"message": {"content": {"a": 1}}}]}), {}, "a message that is not text"),
    "a list": (say("[]"), {}, "no choices with a message"),
}


@pytest.mark.parametrize(("answer", "settings", "message"), TROUBLE.values(), ids=TROUBLE)
def test_trouble_is_asked_again_and_then_told(answer, settings, message):
    longer = {"timeout": 0.5} if "timeout" in settings else {}
    with serving(answer, answer, chat("Score: 10")) as server:
        assert ask(server, count=1, retries=2, **settings | longer).tolist() == [1.0]
        assert len(server.asked) == 3
    with serving(answer) as server:
        with pytest.raises(ServerError, match=message) as error:
            ask(server, retries=1, concurrency=1, **settings)
        # One image was enough to see that none will be judged.
        assert server.count(2) == 2
        assert str(error.value).startswith(f"{server.url}/v1/chat/completions: ") and "\n" not in str(error.value)


def test_broken_pixels_are_not_asked_about():
    images = IMAGES.clone()
    images[1, 0, 0, 0] = math.nan
    images[2, 0, 0, 0] = math.inf
    with serving(chat("Score: 10")) as server:
        scores = judge(server)(images, PROMPTS, [{}] * 4)
        torch.testing.assert_close(scores, torch.tensor([1, math.nan, math.nan, 1]), equal_nan=True)
        assert len(server.asked) == 2
        assert judge(server)(images[1:3], PROMPTS[1:3], [{}] * 2).isnan().all()
        assert judge(server)(images[:0], [], []).shape == (0,) and len(server.asked) == 2


WRONG = {
    "url": ({"url": "localhost:8000"}, "url must be like http://127.0.0.1:8000"),
    "no model": ({"model": " "}, "model must be the name of a model at the server"),
    "preset": ({"preset": "best"}, "preset of vlm_judge must be one of 'rating', 'digits'"),
    "read": ({"read": "stars"}, "read of vlm_judge must be one of 'number', 'json', 'yes_no', 'digits', got 'stars'"),
    "format spec": ({"template": "{prompt!r}"}, r"'{prompt!r}' in template is no field; fields are like {prompt}"),
    "unclosed": ({"template": "Rate {prompt"}, "'{prompt' in template is no field"),
    "spaces": ({"template": "Rate { prompt }"}, "'{ prompt }' in template is no field"),
    "nameless": ({"template": "Rate {}"}, "'{}' in template is no field"),
    "blank": ({"template": "  "}, "template is empty"),
    "pattern": ({"pattern": "Score: ("}, r"pattern 'Score: \(' is no regular expression"),
    "useless pattern": ({"pattern": "x", "read": "json"}, 'pattern is used by read = "number" alone'),
    "range": ({"lowest": 5, "highest": 5}, "lowest must be below highest, and both finite; they are 5 and 5"),
    "endless": ({"highest": math.inf}, "lowest must be below highest, and both finite"),
    "ten": ({"preset": "digits", "highest": 10}, "lowest and highest must be whole numbers from 0 to 9"),
    "half": ({"preset": "digits", "lowest": 0.5}, "lowest and highest must be whole numbers from 0 to 9"),
    "tokens": ({"max_tokens": 0}, "max_tokens must be 1 or more"),
    "temperature": ({"temperature": -1}, "temperature must be 0 or more"),
    "extra": ({"extra": {"messages": [], "n": 2}}, "extra must not hold messages, n, which the reward sets itself"),
    "extra kind": ({"extra": {"a": {1}}}, "extra cannot be sent"),
    "extra no table": ({"extra": 3}, "extra of vlm_judge must be a table, got 3"),
    "format": ({"image_format": "webp"}, "image_format of vlm_judge must be one of 'png', 'jpeg'"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=re.escape(message) if "{" in message else message):
        read_term("vlm_judge", {"url": "http://127.0.0.1:1", "model": "m"} | settings)


def test_templates():
    for preset in PRESETS.values():
        check_template(preset.template)
        assert fill_in(preset.template, "a {cat} {prompt}", {}).count("a {cat} {prompt}") == 1
    check_template('Reply {"score": N}, {{"a": 1}}, or } {3, 4}')
    reward = get_reward("vlm_judge", url="http://127.0.0.1:1", model="m", template="{prompt} {style}")
    reward.check_prompt("a", {"style": "ink"}, (8, 8))
    for metadata in ({}, {"style": None}):
        with pytest.raises(ValueError, match=r"template asks for {style}, which the prompt 'a' does not have; it has"):
            reward.check_prompt("a", metadata, (8, 8))
    assert json.loads(fill_in("{n}", "a", {"n": {"b": [1, "ü"]}})) == {"b": [1, "ü"]}
