"""A small HTTP server on loopback that answers as it is told, badly too, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class Loopback:
    url: str
    asked: list[Asked] = field(default_factory=list)

    def count(self, expected: int) -> int:
        """How often it was asked; one that was not waited for may still be on its way."""
        end = time.monotonic() + 5
        while len(self.asked) < expected and time.monotonic() < end:
            time.sleep(0.005)
        return len(self.asked)


Answer = Callable[[BaseHTTPRequestHandler, Asked], None]


def say(body: bytes | str | dict, status: int = 200, /, **headers: str) -> Answer:
    """A whole answer; headers with _ for -."""
    body = json.dumps(body) if isinstance(body, dict) else body
    body = body.encode() if isinstance(body, str) else body

    def answer(handler, asked):
        handler.send_response(status)
        own = {} if "Transfer_Encoding" in headers else {"Content_Length": str(len(body))}
        for name, value in (own | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def hang(handler, asked):
    """Nothing, until the client has gone."""
    handler.connection.settimeout(20)
    handler.connection.recv(1)


def drip(handler, asked):
    """A byte now and then, so that no single wait is long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    try:
        for _ in range(1000):
            handler.wfile.write(b" ")
            time.sleep(0.02)
    except OSError:
        pass


def close(handler, asked):
    """Not even a status."""


def cut(body: bytes) -> Answer:
    """The beginning of an answer, then the end of the connection."""
    return say(body, 200, Content_Length=str(len(body) + 100))


@contextmanager
def serving(*answers: Answer):
    """A Loopback that gives these answers in turn, and the last one to all that follow."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                asked = Asked(self.path, dict(self.headers), body)
                answer = answers[min(len(loopback.asked), len(answers) - 1)]
                loopback.asked.append(asked)
            answer(self, asked)

        def log_message(self, format, *args):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    loopback = Loopback(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield loopback
    finally:
        server.shutdown()
        server.server_close()
