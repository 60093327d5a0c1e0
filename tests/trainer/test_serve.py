"""`sfgrpo reward serve` and the `remote` reward that asks it, over real sockets on loopback."""

import http.client
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from sfgrpo.rewards import Term, combine, get_reward, mix
from sfgrpo.rewards.server import ServerError
from sfgrpo.rewards.wire import CONTENT_TYPE, pack
from sfgrpo.shapes.captions import parse
from sfgrpo.shapes.scenes import render, scenes_for
from sfgrpo_trainer import reward as command
from sfgrpo_trainer.config import load_config, to_toml, without_folders
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.serve import RewardServer
from tests.rewards import small

TOKEN = "a-token-of-some-length"


@contextmanager
def serving(score, **settings):
    server = RewardServer(score, **settings)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.stop(grace=5)


def remote(server, **settings):
    return get_reward("remote", url=server.url, **({"backoff": 0.01, "timeout": 20} | settings))


def ask(server, method, path, body=b"", headers=None):
    """(status, headers, JSON) of one request by http.client itself."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    try:
        connection.request(method, path, body, {"Content-Type": CONTENT_TYPE} | (headers or {}))
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


class Gate:
    """A reward, the mean of each image, that waits for `open` and keeps the prompts of each call."""

    def __init__(self, is_open=False):
        self.calls, self.open = [], threading.Event()
        if is_open:
            self.open.set()

    def __call__(self, images, prompts, metadata):
        self.calls.append(list(prompts))
        assert self.open.wait(10)
        if "unscorable" in prompts:
            raise ValueError("the prompt 'unscorable' cannot be scored")
        if "crash" in prompts:
            raise ZeroDivisionError("of the reward")
        return images.mean((1, 2, 3))


def pictures(count, size=4, seed=0):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_scores_are_those_of_the_reward_here_to_the_last_bit(tmp_path):
    small.save_clip(tmp_path)
    rewards = {"clip": {"kind": "clip_score", "model": str(tmp_path)}, "jpeg_size": -0.3}
    here = mix(rewards)(small.images(61, 45), small.PROMPTS, [{}] * 5)
    with serving(mix(rewards)) as server:
        for name, wanted in (*here.parts.items(), (None, here.total)):
            got = remote(server, reward=name)(small.images(61, 45), small.PROMPTS, [{}] * 5)
            assert got.dtype == torch.float32 and torch.equal(got, wanted)
    captions = ["two squares", "a red circle", "three blue circles", "a circle"]
    drawn = render(scenes_for([parse(c) for c in captions], torch.Generator().manual_seed(0)))
    drawn = (drawn + 0.02 * torch.randn(drawn.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    asked = [captions[i] for i in (0, 1, 3, 2)]
    here = get_reward("shapes")(drawn, asked)
    assert len(set(here.tolist())) > 2
    with serving(mix({"shapes": 1.0})) as server:
        table = {"mytest": {"kind": "remote", "url": server.url, "reward": "shapes", "weight": 1.0, "batch": 3}}
        scores = mix(table)(drawn, asked, [{}] * 4)
        assert torch.equal(scores.parts["mytest"], here) and torch.equal(scores.total, here)


def test_metadata_arrives_and_what_is_not_finite_is_nan():
    def field(images, prompts, metadata):
        return torch.tensor([float(m["value"]) for m in metadata])

    with serving(combine([Term("field", field, 2.0)])) as server:
        metadata = [{"value": v} for v in ("1.5", "nan", "inf", "-inf")]
        got = remote(server, reward="field")(pictures(4), ["x"] * 4, metadata)
        torch.testing.assert_close(got, torch.tensor([1.5, math.nan, math.nan, math.nan]), equal_nan=True)
        assert remote(server)(pictures(1), ["x"], metadata[:1]).tolist() == [3.0]
        assert ask(server, "POST", "/score", pack(pictures(4), ["x"] * 4, metadata))[2] == {
            "total": [3.0, None, None, None],
            "rewards": {"field": [1.5, None, None, None]},
        }
        with pytest.raises(ServerError, match="has no reward 'shapes'; set reward to one of field"):
            remote(server, reward="shapes")(pictures(1), ["x"], metadata[:1])


def test_requests_that_wait_are_scored_together():
    gate = Gate()
    with serving(combine([Term("gate", gate)]), max_batch=5) as server, ThreadPoolExecutor(8) as pool:
        shapes = {"a": (1, 4), "b": (2, 4), "c": (2, 8), "d": (1, 4), "e": (7, 4), "f": (2, 4)}
        images = {name: pictures(count, size, ord(name)) for name, (count, size) in shapes.items()}
        answers = {}
        for name, batch in images.items():
            queued = server.batcher.waiting + len(batch)
            answers[name] = pool.submit(remote(server), batch, [name] * len(batch), [{}] * len(batch))
            if name == "a":
                until(lambda: gate.calls)
            else:
                until(lambda queued=queued: server.batcher.waiting == queued)
        status, _, health = ask(server, "GET", "/health")
        assert status == 200
        assert health == {"ready": True, "rewards": {"gate": 1.0}, "waiting": 14, "max_batch": 5, "max_queue": 256}
        gate.open.set()
        for name, batch in images.items():
            torch.testing.assert_close(answers[name].result(), batch.mean((1, 2, 3)))
    # Of one size, up to five images; more than that in one request stay together.
    assert gate.calls == [["a"], ["b", "b", "d", "f", "f"], ["c", "c"], ["e"] * 7]


def test_a_request_that_fails_costs_no_other():
    gate = Gate()
    with serving(combine([Term("gate", gate)])) as server, ThreadPoolExecutor(8) as pool:
        first = pool.submit(remote(server), pictures(1), ["first"], [{}])
        until(lambda: gate.calls)
        prompts = ("good", "unscorable", "crash", "fine")
        answers = [pool.submit(ask, server, "POST", "/score", pack(pictures(1), [p], [{}])) for p in prompts]
        until(lambda: server.batcher.waiting == 4)
        gate.open.set()
        statuses = [answer.result()[0] for answer in answers]
        assert statuses == [200, 422, 500, 200] and first.result().shape == (1,)
        assert answers[1].result()[2] == {"error": "the prompt 'unscorable' cannot be scored"}
        assert answers[2].result()[2] == {"error": "the reward failed: ZeroDivisionError of the reward"}
        count = len(gate.calls)
        with pytest.raises(ServerError, match="status 422 .the prompt 'unscorable' cannot be scored."):
            remote(server)(pictures(1), ["unscorable"], [{}])
        with pytest.raises(ServerError, match=r"status 500 .the reward failed: ZeroDivisionError of.* \(3 attempts\)"):
            remote(server, retries=2)(pictures(1), ["crash"], [{}])
        assert len(gate.calls) == count + 1 + 3


def test_a_full_queue_turns_away_and_takes_again():
    gate = Gate()
    with serving(combine([Term("gate", gate)]), max_queue=2) as server, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(remote(server), pictures(1), ["running"], [{}])]
        until(lambda: gate.calls)
        answers.append(pool.submit(remote(server), pictures(2), ["waiting"] * 2, [{}] * 2))
        until(lambda: server.batcher.waiting == 2)
        status, headers, value = ask(server, "POST", "/score", pack(pictures(1), ["late"], [{}]))
        assert (status, value) == (503, {"error": "the queue is full; ask again later"})
        assert 1 <= int(headers["Retry-After"]) <= 60
        with pytest.raises(ServerError, match="status 503 .the queue is full; ask again later.; lower concurrency"):
            remote(server, retries=0)(pictures(1), ["late"], [{}])
        late = pool.submit(remote(server, retries=1), pictures(1), ["late"], [{}])
        gate.open.set()
        assert [len(a.result()) for a in (*answers, late)] == [1, 2, 1]
        assert sorted(p for call in gate.calls for p in call) == ["late", "running", "waiting", "waiting"]


def test_what_nobody_waits_for_is_not_scored():
    gate = Gate()
    with serving(combine([Term("gate", gate)])) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(remote(server), pictures(1), ["first"], [{}])
        until(lambda: gate.calls)
        given_up = pool.submit(remote(server, timeout=0.1, retries=0), pictures(1), ["given up"], [{}])
        until(lambda: server.batcher.waiting == 1)
        with pytest.raises(ServerError, match="no answer within 0.1 s; raise timeout, or ask for less at once"):
            given_up.result()
        until(lambda: server.batcher.waiting == 0)
        gate.open.set()
        first.result()
        remote(server)(pictures(1), ["last"], [{}])
    assert gate.calls == [["first"], ["last"]]


def test_only_who_has_the_token_may_ask(monkeypatch):
    body = pack(pictures(1), ["x"], [{}])
    gate = Gate(is_open=True)
    with serving(combine([Term("gate", gate)]), token=TOKEN) as server:
        for given in (
            {},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer ü"},
        ):
            for method, path in (("GET", "/health"), ("POST", "/score")):
                status, _, value = ask(server, method, path, body, given)
                assert status == 401 and "token is missing or wrong" in value["error"]
        assert gate.calls == []
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert ask(server, "GET", "/health", headers=right)[0] == ask(server, "POST", "/score", body, right)[0] == 200
        monkeypatch.setenv("SFGRPO_TEST_TOKEN", TOKEN)
        assert len(remote(server, token_env="SFGRPO_TEST_TOKEN")(pictures(1), ["x"], [{}])) == 1
        with pytest.raises(ServerError, match="status 401 .*set token_env to the name of an environment variable"):
            remote(server)(pictures(1), ["x"], [{}])


def test_long_requests_are_refused_before_they_are_read():
    with serving(mix({"brightness": 1.0}), max_bytes=1_000_000) as server:
        with pytest.raises(ServerError, match=r"status 413 .7\.5 MB are more than the 1 MB of a request.*ask for less"):
            remote(server, batch=10)(pictures(10, 250), ["x"] * 10, [{}] * 10)
        assert remote(server, batch=1)(pictures(10, 250), ["x"] * 10, [{}] * 10).shape == (10,)


class Written:
    """What unpickling this would do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_what_is_no_request_is_refused_in_a_sentence(tmp_path):
    good = pack(pictures(1), ["x"], [{}])
    trap = pickle.dumps(Written(tmp_path / "unpickled"))
    cases = {
        ("POST", "/score", trap): (400, "no safetensors file"),
        ("POST", "/score", b""): (400, "no safetensors file"),
        ("POST", "/score", good[:-1]): (400, "must be all that follows the header"),
        ("POST", "/score", pack(pictures(1), ["x", "y"], [{}])): (400, "prompts must be 1 strings"),
        ("POST", "/", good): (404, "there is /health to GET and /score to POST"),
        ("GET", "/score", b""): (404, "there is /health to GET and /score to POST"),
        ("PUT", "/score", good): (501, "PUT"),
    }
    with serving(mix({"brightness": 1.0})) as server:
        for request, (status, sentence) in cases.items():
            got, headers, value = ask(server, *request)
            assert got == status and sentence in value["error"] and headers["Content-Type"] == "application/json"
        assert ask(server, "POST", "/score", good, {"Content-Type": "text/plain"})[0] == 415
        assert ask(server, "POST", "/score", good, {"Content-Length": "-5"})[0] == 400
        for length in ("1e3", "0x10", "", "9" * 16, "\u0661"):
            headers = {"Content-Length": length.encode().decode("latin-1")}
            status, _, answer = ask(server, "POST", "/score", good, headers)
            assert (status, answer["error"]) == (400, "Content-Length is no number")
        assert ask(server, "POST", "/score", good)[0] == 200
        no_length = f"POST /score HTTP/1.1\r\nContent-Type: {CONTENT_TYPE}\r\n\r\n"
        for text, sentence in ((no_length, "Content-Length is missing"), ("nonsense\r\n\r\n", "Bad request syntax")):
            with socket.create_connection(server.server_address) as raw:
                raw.sendall(text.encode())
                answer = b"".join(iter(lambda raw=raw: raw.recv(4096), b""))
            assert f'{{"error": "{sentence}'.encode() in answer
        assert ask(server, "POST", "/score", good)[0] == 200
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_stops_ends_what_runs_and_turns_the_rest_away():
    gate = Gate()
    server = RewardServer(combine([Term("gate", gate)]))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(remote(server), pictures(1), ["running"], [{}])
        until(lambda: gate.calls)
        waiting = pool.submit(ask, server, "POST", "/score", pack(pictures(1), ["waiting"], [{}]))
        until(lambda: server.batcher.waiting == 1)
        stopped = pool.submit(server.stop)
        assert waiting.result()[0] == 503
        gate.open.set()
        assert running.result().shape == (1,)
        stopped.result()
    with pytest.raises(ServerError, match="connection refused"):
        remote(server, retries=0)(pictures(1), ["late"], [{}])
    assert gate.calls == [["running"]]


def test_ipv6():
    try:
        server = RewardServer(mix({"brightness": 1.0}), "::1")
    except OSError:
        pytest.skip("needs IPv6")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    assert "[::1]" in server.url and remote(server)(pictures(2), ["x"] * 2, [{}] * 2).shape == (2,)
    server.stop()


CONFIG = """
iterations = 3
[rewards]
size = { kind = "jpeg_size", weight = -0.1, quality = 80 }
brightness = 2
[model]
path = "none of the server's business"
"""


def test_the_command_serves_until_it_is_told_to_end(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.setenv("SFGRPO_TEST_TOKEN", TOKEN)
    arguments = ("reward", "serve", "--config", "run.toml", "--port", "0", "--token-env", "SFGRPO_TEST_TOKEN")
    process = subprocess.Popen(
        [sys.executable, "-m", "sfgrpo_trainer.cli", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving size, brightness at http://127.0.0.1:"), process.stderr.read()
        url = line.split(" at ")[1].split(";")[0]
        reward = get_reward("remote", url=url, token_env="SFGRPO_TEST_TOKEN")
        images = pictures(3, 16)
        wanted = mix({"size": {"kind": "jpeg_size", "weight": -0.1, "quality": 80}, "brightness": 2})(
            images, [], []
        ).total
        assert torch.equal(reward(images, ["x"] * 3, [{}] * 3), wanted)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "ended\n", "")
    finally:
        process.kill()


def test_ctrl_c_ends_it_too(capsys):
    def interrupt():
        line = ""
        while not line.endswith("Ctrl-C ends it\n"):
            time.sleep(0.01)
            line += capsys.readouterr().out
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    assert command.main(["serve", "--reward", "brightness", "--reward", "jpeg_size", "--port", "0"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().out == "ended\n"


MISTAKES = {
    "nothing to do": ([], "required: serve; see sfgrpo reward --help"),
    "nothing to serve": (["serve"], "give --reward NAME, or --config FILE.toml with a table"),
    "unknown": (["serve", "--reward", "beauty"], "--reward: beauty: unknown reward 'beauty'; choose one of"),
    "needs a setting": (["serve", "--reward", "aesthetic"], "--reward: aesthetic: aesthetic needs the setting head"),
    "no files": (["serve", "--config", "missing.toml"], "reward clip_score: folder /no/such/folder"),
    "no such table": (
        ["serve", "--config", "run.toml", "--reward", "ocr"],
        "has no reward ocr; it has size, brightness",
    ),
    "no table": (["serve", "--config", "empty.toml"], r"empty\.toml has no table \[rewards\]"),
    "no config": (["serve", "--config", "no.toml"], r"run file no\.toml does not exist"),
    "open": (
        ["serve", "--reward", "shapes", "--host", "0.0.0.0"],
        "--host 0.0.0.0 lets other machines ask; give --tok",
    ),
    "open6": (["serve", "--reward", "shapes", "--host", "::"], "--host :: lets other machines ask; give --token-env"),
    "everywhere": (["serve", "--reward", "shapes", "--host", ""], "--host  lets other machines ask"),
    "no token": (["serve", "--reward", "shapes", "--token-env", "SFGRPO_TEST_NONE"], "must hold a token of 16 letters"),
    "short": (["serve", "--reward", "shapes", "--token-env", "SFGRPO_TEST_SHORT"], "must hold a token of 16 letters"),
    "port": (["serve", "--reward", "shapes", "--port", "65536"], "--port must be from 0 to 65535"),
    "host": (["serve", "--reward", "shapes", "--host", "127.0.0.1", "--port", "{taken}"], "cannot listen at 127.0.0.1"),
    "batch": (["serve", "--reward", "shapes", "--max-batch", "0"], "--max-batch must be above 0"),
    "wait": (["serve", "--reward", "shapes", "--max-wait", "-1"], "--max-wait must be 0 seconds or more"),
    "size": (["serve", "--reward", "shapes", "--max-request-mb", "nan"], "--max-request-mb must be above 0"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFGRPO_TEST_SHORT", "secret")
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "empty.toml").write_text("iterations = 3\n")
    (tmp_path / "missing.toml").write_text('[rewards]\nclip_score = { model = "/no/such/folder" }\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = [a.format(taken=taken.getsockname()[1]) for a in arguments]
        with pytest.raises(UserError, match=message) as error:
            command.main(arguments)
    assert "\n" not in str(error.value)


def test_a_token_lets_it_listen_elsewhere(monkeypatch):
    monkeypatch.setenv("SFGRPO_TEST_TOKEN", TOKEN)
    options = command._parser().parse_args(["serve", "--host", "0.0.0.0", "--token-env", "SFGRPO_TEST_TOKEN"])
    assert command._token(options) == TOKEN
    local = command._parser().parse_args(["serve", "--host", "::1"])
    assert command._token(local) == ""


def test_run_files_with_servers(tmp_path):
    rewards = """
    [rewards]
    mine = { kind = "remote", url = "http://10.1.2.3:8190", reward = "geneval", token_env = "MY_TOKEN" }
    vlm_judge = { url = "http://10.1.2.3:8000", model = "Qwen/VL" }
    """
    (tmp_path / "Qwen" / "VL").mkdir(parents=True)
    (tmp_path / "run.toml").write_text(f'model = {{ path = "shapes" }}\nprompts = {{ file = "p.txt" }}\n{rewards}')
    config = load_config(tmp_path / "run.toml")
    assert "10.1.2.3" in to_toml(config)
    bare = without_folders(config)
    assert "10.1.2.3" not in to_toml(bare)
    (tmp_path / "again.toml").write_text(to_toml(bare))
    again = load_config(tmp_path / "again.toml").rewards
    # Names at a server are no paths here, not even where there is such a folder.
    assert again["mine"]["reward"] == "geneval" and again["vlm_judge"]["model"] == "Qwen/VL"


def test_help(capsys):
    assert command.main(["serve", "--help"]) == 0
    assert "--token-env VAR" in capsys.readouterr().out


def test_bodies_of_the_right_content_type_at_the_size_limit_and_with_headers_that_lie():
    good = pack(torch.zeros(1, 3, 4, 4), ["a"], [{}])

    def with_header(header: bytes) -> bytes:
        return len(header).to_bytes(8, "little") + header

    texts = {"prompts": '["a"]', "metadata": "[{}]"}
    tensor = {"dtype": "F32", "shape": [1, 3, 4, 4], "data_offsets": [0, 192]}
    lies = [
        b"[" * 100_000,
        b"\xff\xfe",
        b"[]",
        b"9" * 5000,
        json.dumps({"images": tensor, "__metadata__": {**texts, "prompts": "[" * 100_000}}).encode(),
        json.dumps({"images": tensor, "__metadata__": {**texts, "prompts": 3}}).encode(),
        json.dumps({"images": {**tensor, "shape": [10**30, 3, 4, 4]}, "__metadata__": texts}).encode(),
        json.dumps({"images": {**tensor, "shape": [True, 3, 4, 4]}, "__metadata__": texts}).encode(),
        json.dumps({"images": {**tensor, "data_offsets": [0, 10**30]}, "__metadata__": texts}).encode(),
        json.dumps({"images": tensor, "__metadata__": texts}).encode(),
    ]
    score = combine([Term("grey", lambda images, prompts, metadata: images.mean((1, 2, 3)))])
    with serving(score, max_bytes=1_000_000) as server:
        for lie in lies:
            status, _, answer = ask(server, "POST", "/score", with_header(lie))
            assert status == 400 and answer["error"], lie[:60]
        assert ask(server, "POST", "/score", (2**64 - 1).to_bytes(8, "little"))[0] == 400
        assert ask(server, "POST", "/score", bytes(1_000_000))[0] == 400
        assert ask(server, "POST", "/score", bytes(1_000_001))[0] == 413
        assert ask(server, "POST", "/score", good)[2]["total"] == [0.0]
    with serving(score, max_bytes=len(good)) as server:
        assert ask(server, "POST", "/score", good)[0] == 200
    with serving(score, max_bytes=len(good) - 1) as server:
        assert ask(server, "POST", "/score", good)[0] == 413
