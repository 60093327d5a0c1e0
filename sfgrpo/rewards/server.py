"""What rewards behind HTTP share: settings, retries, requests in parallel, and errors that say what to do.

An attempt has failed where no whole answer has come after `timeout` seconds, where the connection breaks off, for the
statuses 408, 425, 429 and 5xx, and where the answer is not what was asked for. It is repeated `retries` times, each
time after the server's Retry-After (60 s at most), or else after

    u min(backoff 2^k, 30 s),  k = 0, 1, ...,  u uniform in [0.5, 1]

Any other status ends it at once.
"""

from __future__ import annotations

import math
import os
import random
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from queue import SimpleQueue
from socket import gaierror
from threading import Event, Thread
from typing import Any, TypeVar

from .http import check_url, message_of, request, retry_after

T = TypeVar("T")
R = TypeVar("R")

AGAIN = (408, 425, 429)
LONGEST_BACKOFF = 30.0
LONGEST_RETRY_AFTER = 60.0


class ServerError(RuntimeError):
    """The server of a reward gave no scores; one sentence that names its URL, the cause, and what to do."""


@dataclass(eq=False)
class _Failure(Exception):
    """An attempt that failed."""

    cause: str
    advice: str
    final: bool = False
    """Another attempt would fail too."""
    retry_after: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServerReward:
    """Base of the rewards that are computed elsewhere, behind HTTP."""

    url: str
    """Where the server is: http:// or https://, host, port, and whatever comes before the paths of its API."""
    timeout: float = 120.0
    """Seconds for one request, from connecting to the end of the answer."""
    retries: int = 4
    """Further attempts after one that failed."""
    backoff: float = 1.0
    """Seconds, about, before the second attempt; doubled each time, 30 at most."""
    concurrency: int = 8
    """Requests at once."""
    token_env: str = ""
    """Name of the environment variable that holds the server's token or API key, sent as `Authorization: Bearer`;
    "" sends none. The token itself never stands in a run file."""

    def __post_init__(self) -> None:
        check_url(self.url)
        if not 0 < self.timeout < math.inf:
            raise ValueError("timeout must be above 0 seconds and finite")
        if self.retries < 0:
            raise ValueError("retries must be 0 or more")
        if not 0 <= self.backoff < math.inf:
            raise ValueError("backoff must be 0 seconds or more and finite")
        if self.concurrency < 1:
            raise ValueError("concurrency must be 1 or more")
        if self.token_env and not re.fullmatch(r"[A-Za-z_]\w*", self.token_env, re.ASCII):
            raise ValueError("token_env must be the name of an environment variable, not the token itself")

    def check(self) -> None:
        """Raise ValueError where the environment variable of the token is not set; asks nothing of the server."""
        self._headers()

    def post(self, path: str, body: bytes, kind: str, read: Callable[[bytes], T], stop: Event) -> T:
        """What `read` makes of the server's answer to a POST.

        path: below `url`. kind: the content type of `body`. read: raises ValueError for an answer that is not what was
        asked for, which is then asked for again, and ServerError where it never will be. stop: when it is set, there
        are no more attempts. Raises ServerError, its __cause__ what `read` raised, if it did.
        """
        address = self.url.rstrip("/") + path
        headers = self._headers() | {"Content-Type": kind, "Connection": "close"}
        for attempt in range(self.retries + 1):
            if stop.is_set():
                raise ServerError(f"{address}: stopped")
            try:
                return self._attempt(address, body, headers, read)
            except _Failure as failure:
                last = failure
            if last.final:
                break
            if attempt < self.retries:
                stop.wait(pause(attempt, self.backoff, last.retry_after))
        tries = f" ({attempt + 1} attempts)" if attempt else ""
        raise ServerError(f"{address}: {last.cause}{tries}; {last.advice}") from last.__cause__

    def _headers(self) -> dict[str, str]:
        headers = {"User-Agent": "sfgrpo", "Accept": "application/json"}
        if self.token_env:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise ValueError(f"the environment variable {self.token_env} (token_env) is not set")
            if not re.fullmatch(r"[!-~]+", token):
                raise ValueError(f"the environment variable {self.token_env} (token_env) holds no token")
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _attempt(self, address: str, body: bytes, headers: dict[str, str], read: Callable[[bytes], T]) -> T:
        try:
            status, answered, answer = request(address, body, headers, self.timeout)
        except ssl.SSLCertVerificationError as error:
            advice = "give the server a valid one, or set SSL_CERT_FILE to the authority's"
            raise _Failure(f"its certificate is refused: {error.verify_message}", advice, final=True) from None
        except TimeoutError:
            advice = "raise timeout, or ask for less at once"
            raise _Failure(f"no answer within {self.timeout:g} s", advice) from None
        except ConnectionRefusedError:
            raise _Failure("connection refused", "start the server, or correct url") from None
        except gaierror:
            raise _Failure("its host is not known", "correct url, or the machine's network") from None
        except (OSError, HTTPException) as error:
            what = f" ({error})" if str(error) else ""
            advice = "look into the server's log, and whether url is right"
            raise _Failure(f"the connection broke off: {type(error).__name__}{what}", advice) from None
        if status != 200:
            raise _refused(status, answered, answer)
        try:
            return read(answer)
        except ValueError as error:
            advice = "look whether url is that of such a server"
            raise _Failure(f"an answer that is none: {error}", advice) from error


def _refused(status: int, headers: Any, answer: bytes) -> _Failure:
    """What a status other than 200 means."""
    cause = f"status {status}{message_of(answer)}"
    if 300 <= status < 400:
        return _Failure(f"{cause}, a redirect to {headers.get('Location')}", "set url to where it leads", final=True)
    advice = {
        401: "set token_env to the name of an environment variable that holds its token",
        403: "set token_env to the name of an environment variable that holds its token",
        404: "correct url, or the name that is asked for",
        413: "ask for less at once",
        429: "lower concurrency, or raise retries",
        503: "lower concurrency, or raise retries",
    }.get(status, "see what the server says of it")
    return _Failure(cause, advice, not (status in AGAIN or status >= 500), retry_after(headers.get("Retry-After")))


def pause(attempt: int, backoff: float, asked: float | None) -> float:
    """Seconds to wait after attempt 0, 1, ...; asked: the server's Retry-After."""
    if asked is not None:
        return min(max(asked, 0.0), LONGEST_RETRY_AFTER)
    return random.uniform(0.5, 1.0) * min(backoff * 2**attempt, LONGEST_BACKOFF)


def in_threads(work: Callable[[T, Event], R], items: Sequence[T], threads: int) -> list[R]:
    """[work(item, stop) for each item], by so many threads at once, in the order of the items.

    The first exception is raised without waiting for the others, which find the Event `stop` set.
    """
    todo, done, stop = deque(enumerate(items)), SimpleQueue(), Event()

    def run() -> None:
        while not stop.is_set():
            try:
                i, item = todo.popleft()
            except IndexError:
                return
            try:
                done.put((i, work(item, stop), None))
            except BaseException as error:
                stop.set()
                done.put((i, None, error))

    results: list[Any] = [None] * len(items)
    try:
        # Daemons: an interrupted run does not wait for answers that nobody will read.
        for _ in range(min(threads, len(items))):
            Thread(target=run, daemon=True).start()
        for _ in items:
            i, results[i], error = done.get()
            if error is not None:
                raise error
    finally:
        stop.set()
    return results
