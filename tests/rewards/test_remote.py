"""The `remote` reward: what it sends, and what becomes of all that a server can do wrong."""

import json
import math
import socket
import time
from email.utils import formatdate

import pytest
import safetensors.torch
import torch

from sfgrpo.rewards import REWARDS, get_reward, mix
from sfgrpo.rewards.http import retry_after
from sfgrpo.rewards.server import ServerError, in_threads, pause
from sfgrpo.rewards.wire import numbers, pack, scores, unpack
from tests.rewards.loopback import close, cut, drip, hang, say, serving

PROMPTS = ["a cat", "zwei {Hunde} “”", 'c "\n']
METADATA = [{}, {"tag": "x", "include": [{"class": "dog", "count": 2}]}, {"text": ["ü"]}]
IMAGES = torch.rand(3, 3, 5, 4, generator=torch.Generator().manual_seed(0))
GOOD = {"total": [0.25, None, -3], "rewards": {"a": [1, 2.5, None], "total": [7, 8, 9]}}


def remote(server, **settings):
    return get_reward("remote", url=server.url, **({"backoff": 0.0, "timeout": 10} | settings))


def ask(server, **settings):
    return remote(server, **settings)(IMAGES, PROMPTS, METADATA)


def same(got, wanted):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)


def test_a_request_is_a_safetensors_file_and_the_answer_is_read(tmp_path):
    with serving(say(GOOD)) as server:
        same(ask(server), [0.25, math.nan, -3.0])
        same(ask(server, reward="a"), [1.0, 2.5, math.nan])
        same(ask(server, reward="total"), [7.0, 8.0, 9.0])
        one = server.asked[0]
        assert one.path == "/score" and "Authorization" not in one.headers
        (tmp_path / "body").write_bytes(one.body)
        with safetensors.safe_open(tmp_path / "body", "pt") as file:
            assert list(file.keys()) == ["images"] and torch.equal(file.get_tensor("images"), IMAGES)
            texts = file.metadata()
        assert json.loads(texts["prompts"]) == PROMPTS and json.loads(texts["metadata"]) == METADATA


def test_files_of_safetensors_itself_are_read():
    metadata = {"prompts": json.dumps(PROMPTS), "metadata": json.dumps(METADATA)}
    images, prompts, read = unpack(bytearray(safetensors.torch.save({"images": IMAGES}, metadata)))
    assert torch.equal(images, IMAGES) and prompts == PROMPTS and read == METADATA


def test_numbers_come_back_to_the_last_bit():
    given = torch.cat(
        [torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-20, torch.tensor([3e38, 0.1])]
    )
    same(scores(json.loads(json.dumps(numbers(given))), len(given)), given.tolist())
    assert numbers(torch.tensor([math.nan, math.inf, -math.inf])) == [None] * 3


def test_parts_come_back_in_order_however_they_overtake_each_other():
    def first_pixels(handler, asked):
        images, prompts, _ = unpack(bytearray(asked.body))
        time.sleep(0.002 * (11 - int(prompts[0])) % 0.02)
        values = images[:, 0, 0, 0].tolist()
        say({"total": values, "rewards": {"x": values}})(handler, asked)

    images = torch.rand(23, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    with serving(first_pixels) as server:
        for batch, concurrency, requests in ((2, 5, 12), (1, 8, 23), (100, 3, 1)):
            server.asked.clear()
            reward = remote(server, batch=batch, concurrency=concurrency)
            same(reward(images, [str(i) for i in range(23)], [{}] * 23), images[:, 0, 0, 0].tolist())
            assert len(server.asked) == requests
        assert remote(server)(images[:0], [], []).shape == (0,)


TROUBLE = {
    "slow": ([hang], {"timeout": 0.1}, "no answer within 0.1 s"),
    "drip": ([drip], {"timeout": 0.1}, "no answer within 0.1 s"),
    "500": ([say({"error": "the reward failed"}, 500)], {}, r"status 500 \(the reward failed\)"),
    "429": ([say("slow down", 429, Retry_After="0")], {"backoff": 1000.0}, "status 429 .*lower concurrency"),
    "503": ([say("", 503, Retry_After=formatdate(usegmt=True))], {"backoff": 1000.0}, "status 503"),
    "truncated JSON": ([say('{"total": [0.25, nu')], {}, 'not JSON but \'{"total"'),
    "cut off": ([cut(b'{"total": [0.25')], {}, "broke off: HTTPException .the answer is cut off"),
    "chunks cut off": ([say(b"5\r\nhello\r\n5\r\nhe", 200, Transfer_Encoding="chunked")], {}, "broke off: Incomplete"),
    "closed": ([close], {}, "broke off: RemoteDisconnected"),
    "HTML": ([say("<html><body>Sign in</body></html>")], {}, "not JSON but '<html><body>Sign in"),
    "not UTF-8": ([say(b'{"total": "\xff\xfe"}')], {}, "not UTF-8"),
    "two scores": ([say({"total": [1, 2], "rewards": {}})], {}, "2 scores for 3 images"),
    "four scores": ([say({"total": [1, 2, 3, 4], "rewards": {}})], {}, "4 scores for 3 images"),
    "no list": ([say({"total": 1.0, "rewards": {}})], {}, "no list of numbers"),
    "texts": ([say({"total": ["1", "2", "3"], "rewards": {}})], {}, "no list of numbers"),
    "truths": ([say({"total": [True, False, True], "rewards": {}})], {}, "no list of numbers"),
    "a list": ([say("[1, 2, 3]")], {}, 'no "rewards"'),
}


@pytest.mark.parametrize(("answers", "settings", "message"), TROUBLE.values(), ids=TROUBLE)
def test_what_fails_is_asked_again_and_then_told(answers, settings, message):
    with serving(*answers) as server:
        with pytest.raises(ServerError, match=message) as error:
            ask(server, retries=2, **settings)
        assert str(error.value).startswith(f"{server.url}/score: ") and "(3 attempts); " in str(error.value)
        assert "\n" not in str(error.value)
        assert server.count(3) == 3
    longer = {"timeout": 0.5} if "timeout" in settings else {}
    with serving(*answers, say(GOOD)) as server:
        same(ask(server, retries=2, **settings | longer), [0.25, math.nan, -3.0])
        assert len(server.asked) == len(answers) + 1


FINAL = {
    "400": (say({"error": "images must be F32"}, 400), r"status 400 \(images must be F32\); see what the server says"),
    "401": (say({"error": {"message": "no token"}}, 401), r"status 401 \(no token\); set token_env to the name"),
    "404": (say("<html>Not found</html>", 404), "status 404; correct url"),
    "413": (say({"detail": "too long"}, 413), r"status 413 \(too long\); ask for less at once"),
    "422": (say({"error": "'x' is not a caption"}, 422), "status 422 .'x' is not a caption"),
    "redirect": (say("", 307, Location="http://127.0.0.1:9/score"), "a redirect to http://127.0.0.1:9/score; set url"),
}


@pytest.mark.parametrize(("answer", "message"), FINAL.values(), ids=FINAL)
def test_what_will_not_change_is_told_at_once(answer, message):
    with serving(answer, say(GOOD)) as server:
        with pytest.raises(ServerError, match=message):
            ask(server, backoff=1000.0)
        assert len(server.asked) == 1


def test_an_unknown_reward_is_told_at_once():
    with serving(say(GOOD)) as server:
        with pytest.raises(ServerError, match="has no reward 'b'; set reward to one of a, total"):
            ask(server, reward="b")
        assert len(server.asked) == 1


def test_a_server_that_is_not_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        reward = get_reward("remote", url=url, retries=1, backoff=0.0)
        with pytest.raises(ServerError, match=f"{url}/score: connection refused .2 attempts.; start the server, or"):
            reward(IMAGES, PROMPTS, METADATA)


def test_the_first_failure_ends_the_other_requests():
    with serving(say({"error": "no"}, 400), hang) as server:
        with pytest.raises(ServerError, match="status 400"):
            ask(server, batch=1, concurrency=1)
        assert len(server.asked) == 1


def test_the_token_comes_from_the_environment_and_stays_out_of_errors(monkeypatch):
    with serving(say(GOOD), say({"error": "no"}, 403)) as server:
        reward = remote(server, token_env="SFGRPO_TEST_TOKEN")
        monkeypatch.delenv("SFGRPO_TEST_TOKEN", raising=False)
        with pytest.raises(ValueError, match="environment variable SFGRPO_TEST_TOKEN .token_env. is not set"):
            reward.check()
        monkeypatch.setenv("SFGRPO_TEST_TOKEN", "two words")
        with pytest.raises(ValueError, match="SFGRPO_TEST_TOKEN .token_env. holds no token"):
            reward.check()
        monkeypatch.setenv("SFGRPO_TEST_TOKEN", "s3cret")
        reward.check()
        assert server.asked == []
        reward(IMAGES, PROMPTS, METADATA)
        assert server.asked[0].headers["Authorization"] == "Bearer s3cret"
        with pytest.raises(ServerError) as error:
            reward(IMAGES, PROMPTS, METADATA)
        assert "s3cret" not in str(error.value) + repr(reward)


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    with serving(say(GOOD)) as server, serving(say({}, 500)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        ask(server)
        assert len(server.asked) == 1 and proxy.asked == []


WRONG = {
    "no scheme": ({"url": "127.0.0.1:8190"}, "url must be like http://127.0.0.1:8000, not '127.0.0.1:8190'"),
    "file": ({"url": "file:///etc/passwd"}, "url must be like"),
    "ftp": ({"url": "ftp://host"}, "url must be like"),
    "no host": ({"url": "http://"}, "url must be like"),
    "port": ({"url": "http://host:99999"}, "url must be like"),
    "newline": ({"url": "http://host/a\nb"}, "url must be like"),
    "password": ({"url": "http://me:pw@host"}, "url must not hold a name or password; use token_env"),
    "query": ({"url": "http://host/?key=1"}, "url must end before"),
    "token": ({"token_env": "sk-abc"}, "token_env must be the name of an environment variable, not the token itself"),
    "timeout": ({"timeout": 0}, "timeout must be above 0"),
    "forever": ({"timeout": math.inf}, "timeout must be above 0 seconds and finite"),
    "retries": ({"retries": -1}, "retries must be 0 or more"),
    "backoff": ({"backoff": -1.0}, "backoff must be 0 seconds or more"),
    "concurrency": ({"concurrency": 0}, "concurrency must be 1 or more"),
    "batch": ({"batch": 0}, "batch must be 1 or more"),
    "reward": ({"reward": 3}, "reward of remote must be text, got 3"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        get_reward("remote", **({"url": "http://127.0.0.1:1"} | settings))
    assert "pw" not in str(error.value)


def test_as_run_files_name_it():
    with serving(say(GOOD)) as server:
        table = {"kind": "remote", "url": server.url + "/", "reward": "a", "weight": 2.0}
        score = mix({"mine": table})
        score.check()
        score.check_prompt("a cat", METADATA[1], (8, 8))
        assert server.asked == []
        same(score(IMAGES, PROMPTS, METADATA).total, [2.0, 5.0, math.nan])
        assert server.asked[0].path == "/score"
    assert "remote" in REWARDS
    with pytest.raises(ValueError, match="the metadata of prompt 'x' cannot be sent"):
        score.check_prompt("x", {"a": {1, 2}}, (8, 8))
    with pytest.raises(ValueError, match="3 images, 2 prompts and 3 metadata do not agree"):
        get_reward("remote", url="http://127.0.0.1:1")(IMAGES, PROMPTS[:2], METADATA)


def test_waits_double_up_to_half_a_minute_unless_the_server_says():
    for attempt, longest in enumerate((1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)):
        waits = [pause(attempt, 1.0, None) for _ in range(200)]
        assert longest / 2 <= min(waits) < max(waits) <= longest and max(waits) - min(waits) > longest / 4
    assert [pause(0, 1.0, s) for s in (7.0, 0.0, -5.0, 3600.0)] == [7.0, 0.0, 0.0, 60.0]
    assert (retry_after("7"), retry_after(None), retry_after("soon"), retry_after("inf")) == (7.0, None, None, None)
    assert 7 < retry_after(formatdate(time.time() + 10, usegmt=True)) < 11


def test_threads_keep_the_order_and_the_first_error_stops_them():
    assert in_threads(lambda x, stop: time.sleep(0.001 * (7 - x)) or x * x, range(7), 3) == [x * x for x in range(7)]
    assert in_threads(lambda x, stop: x, [], 3) == []
    seen = []

    def work(x, stop):
        seen.append(x)
        if x == 2:
            raise KeyError(x)
        stop.wait(20 if x > 2 else 0)

    with pytest.raises(KeyError):
        in_threads(work, range(100), 2)
    assert len(seen) <= 4


NO_BODY = {
    "short": (lambda body: body[:5], "no safetensors file"),
    "header beyond the end": (lambda body: b"\xff" * 8 + body[8:], "no safetensors file, or its header is too long"),
    "a pickle": (lambda body: b"\x80\x04\x95" + body, "no safetensors file"),
    "cut": (lambda body: body[:-4], "must be all that follows the header, 720 bytes"),
    "more": (lambda body: body + b"1234", "must be all that follows the header"),
    "type": (lambda body: body.replace(b'"F32"', b'"F16"'), "must be F32 of shape .B, 3, H, W., not F16"),
    "channels": (lambda body: body.replace(b"[3, 3, 5, 4]", b"[5, 4, 3, 3]"), "must be F32 of shape"),
    "negative": (lambda body: body.replace(b"[3, 3, 5, 4]", b"[3, 3,-5,-4]"), "must be F32 of shape"),
    "huge": (lambda body: body.replace(b"[3, 3, 5, 4]", b"[3, 3, 9,99]"), "must be all that follows the header"),
    "offsets": (lambda body: body.replace(b"[0, 720]", b"[4, 720]"), "must be all that follows the header"),
    "no JSON": (lambda body: body.replace(b'{"__meta', b'["__meta'), "the header is not as it should be"),
    "no images": (lambda body: body.replace(b'"images"', b'"imagen"'), "the header is not as it should be: KeyError"),
}


@pytest.mark.parametrize(("damage", "message"), NO_BODY.values(), ids=NO_BODY)
def test_a_body_that_is_none_is_refused(damage, message):
    body = pack(IMAGES, PROMPTS, METADATA)
    damaged = damage(body)
    assert damaged != body
    with pytest.raises(ValueError, match=message):
        unpack(bytearray(damaged))


def test_prompts_and_metadata_must_be_one_for_each_image():
    with pytest.raises(ValueError, match="prompts must be 3 strings, one for each image"):
        unpack(bytearray(pack(IMAGES, PROMPTS[:2], METADATA)))
    with pytest.raises(ValueError, match="prompts must be 3 strings"):
        unpack(bytearray(pack(IMAGES, [1, 2, 3], METADATA)))
    with pytest.raises(ValueError, match="metadata must be 3 objects, one for each image"):
        unpack(bytearray(pack(IMAGES, PROMPTS, METADATA[:2])))
