"""`sfgrpo reward serve`: rewards behind HTTP, for the `remote` reward of runs elsewhere.

POST /score   a safetensors body, answered by scores in JSON: `sfgrpo/rewards/wire.py` has both
GET /health   {"ready", "rewards": {name: weight}, "max_batch", "waiting", "max_queue"}

Any status but 200 comes with {"error": one sentence}: 400 a body that is none, 401 no token or a wrong one, 404 another
path, 411 no length, 413 too long, 415 another content type, 422 what the reward cannot score, 500 a reward that failed,
502 one whose own server failed, 503 with Retry-After a full queue. Nothing is unpickled: JSON and float32 are all that
is read. There is no TLS: over a network that is not trusted, put it behind an SSH tunnel or a reverse proxy.
"""

from __future__ import annotations

import hmac
import json
import re
import socket
import socketserver
import sys
import time
import traceback
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition

from sfgrpo.rewards import Mix
from sfgrpo.rewards.guard import WrongScores
from sfgrpo.rewards.http import shown
from sfgrpo.rewards.server import ServerError
from sfgrpo.rewards.wire import CONTENT_TYPE, numbers, unpack

from .batcher import Batcher, Busy

HEALTH, SCORE = "/health", "/score"


class RewardServer(ThreadingHTTPServer):
    """Serves a mix of rewards until `stop`. `serve_forever` runs it.

    score: the rewards. token: what requests must carry; "" lets everybody in. max_bytes: of one request; as much again
    three times over may be under way at once. Raises OSError where the address cannot be bound.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        score: Mix,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str = "",
        max_batch: int = 32,
        max_wait: float = 0.01,
        max_queue: int = 256,
        max_bytes: int = 256_000_000,
    ) -> None:
        self.score, self.token, self.max_bytes = score, token, max_bytes
        self.bytes, self.requests, self.changed = 0, 0, Condition()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)
        self.batcher = Batcher(score, max_batch=max_batch, max_wait=max_wait, max_queue=max_queue)

    def server_bind(self) -> None:
        # That of HTTPServer asks the name service for this machine's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # A client that has gone is no error of ours.
            traceback.print_exc()

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.server_address[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self, grace: float = 10.0) -> bool:
        """End: no new requests, those that wait are turned away, and the batch under way has `grace` seconds.

        Returns whether that was enough.
        """
        self.shutdown()
        ended = self.batcher.close(grace)
        with self.changed:
            self.changed.wait_for(lambda: not self.requests, grace if ended else 0)
        self.server_close()
        return ended


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it."""

    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sfgrpo", ""
    timeout = 60
    """Seconds that a client may be silent while it sends."""

    def do_GET(self) -> None:
        if self._may_enter():
            if self.path != HEALTH:
                return self._refuse(404, f"there is {HEALTH} to GET and {SCORE} to POST")
            batcher = self.server.batcher
            health = {"ready": batcher.ready, "rewards": {t.name: t.weight for t in self.server.score.terms}}
            health |= {"waiting": batcher.waiting, "max_batch": batcher.max_batch, "max_queue": batcher.max_queue}
            self._answer(200 if batcher.ready else 503, health)

    def do_POST(self) -> None:
        length = self._length() if self._may_enter() else None
        if length is None:
            return
        server = self.server
        with server.changed:
            room = server.bytes + length <= 4 * server.max_bytes and server.batcher.waiting < server.batcher.max_queue
            if room:
                server.bytes += length
                server.requests += 1
        if not room:
            return self._busy(server.batcher.delay())
        try:
            self._score(length)
        finally:
            with server.changed:
                server.bytes -= length
                server.requests -= 1
                server.changed.notify_all()

    def _may_enter(self) -> bool:
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.server.token}"
        if not self.server.token or hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode()):
            return True
        self._refuse(401, "the token is missing or wrong; send it as Authorization: Bearer")
        return False

    def _length(self) -> int | None:
        """Bytes of a body that may be read; None where the request was refused."""
        text = self.headers.get("Content-Length")
        if self.path != SCORE:
            self._refuse(404, f"there is {HEALTH} to GET and {SCORE} to POST")
        elif self.headers.get_content_type() != CONTENT_TYPE:
            self._refuse(415, f"the content type must be {CONTENT_TYPE}")
        elif text is None:
            self._refuse(411, "Content-Length is missing")
        elif not re.fullmatch(r"[0-9]{1,15}", text):
            self._refuse(400, "Content-Length is no number")
        elif int(text) > self.server.max_bytes:
            mb = self.server.max_bytes / 1e6
            self._refuse(413, f"{int(text) / 1e6:.1f} MB are more than the {mb:g} MB of a request; send fewer images")
        else:
            return int(text)
        return None

    def _score(self, length: int) -> None:
        body = bytearray(length)
        view, got = memoryview(body), 0
        while got < length:
            more = self.rfile.readinto(view[got:])
            if not more:
                return  # The client has gone.
            got += more
        try:
            job = self.server.batcher.submit(*unpack(body))
        except ValueError as error:
            return self._refuse(400, str(error))
        except Busy as busy:
            return self._busy(busy.seconds)
        while not job.done.wait(0.5):
            if self._gone():
                job.abandoned = True
                return
        if job.error is None:
            parts = {name: numbers(part) for name, part in job.scores.parts.items()}
            self._answer(200, {"total": numbers(job.scores.total), "rewards": parts})
        elif isinstance(job.error, Busy):
            self._busy(job.error.seconds)
        elif isinstance(job.error, ServerError):
            self._refuse(502, shown(str(job.error), quotes=False))
        elif isinstance(job.error, ValueError) and not isinstance(job.error, WrongScores):
            self._refuse(422, shown(str(job.error), quotes=False))
        else:
            traceback.print_exception(type(job.error), job.error, job.error.__traceback__)
            self._refuse(500, f"the reward failed: {type(job.error).__name__} {shown(str(job.error), quotes=False)}")

    def _gone(self) -> bool:
        """Whether the client has closed the connection."""
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def _busy(self, seconds: int) -> None:
        self._refuse(503, "the queue is full; ask again later", {"Retry-After": str(seconds)})

    def _refuse(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        self._answer(status, {"error": sentence}, headers)
        # What is still on its way is read and dropped for a moment: a connection that is closed before would be reset,
        # and the client might never see the answer.
        end = time.monotonic() + 2
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(0.5)
            while time.monotonic() < end and self.connection.recv(1 << 20):
                pass

    def _answer(self, status: int, value: dict, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value, allow_nan=False).encode()
        self.close_connection = True
        self.send_response(status)
        own = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        for name, text in (own | (headers or {})).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class says of a request that it cannot read, as JSON too."""
        self._refuse(int(code), message or "the request cannot be read")

    def log_message(self, format: str, *args) -> None:
        """Say nothing of single requests."""
