"""HTTP for rewards, by the standard library: one request with a limit on its whole time, and what its answer says.

Redirects are not followed and proxies of the environment are not used: what is sent, a token among it, goes to the
host of the URL and nowhere else.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

MOST_BYTES = 64_000_000
"""Of an answer."""


def request(address: str, body: bytes, headers: dict[str, str], timeout: float) -> tuple[int, Any, bytes]:
    """One POST: status, headers and body of the answer. Raises OSError or HTTPException where none comes whole."""
    url = urlsplit(address)
    end = time.monotonic() + timeout
    connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.hostname, url.port, timeout=timeout)

    def limit() -> None:
        # A socket's own limit is for each operation; this makes it one for all of them.
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)

    try:
        connection.connect()
        sock = connection.sock
        limit()
        # A server that refuses a long body may close before it has read it; why, it has said before.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", url.path, body, headers)
        limit()
        response = connection.getresponse()
        answer = bytearray()
        while part := response.read1(65536):
            answer += part
            if len(answer) > MOST_BYTES:
                raise HTTPException(f"more than {MOST_BYTES / 1e6:.0f} MB")
            if not response.isclosed():
                limit()
        if response.length:
            raise HTTPException("the answer is cut off")
        return response.status, response.headers, bytes(answer)
    finally:
        connection.close()


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which has them or a date; None where there is none that can be read."""
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return seconds if math.isfinite(seconds) else None
    with suppress(ValueError, TypeError):
        return parsedate_to_datetime(value).timestamp() - time.time()
    return None


def read_json(answer: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, showing its beginning, for anything else."""
    try:
        return json.loads(answer.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON but {shown(answer.decode())}") from None


def message_of(answer: bytes) -> str:
    """` (what the server says)` of an error's body, as usual servers give it; "" for what is not JSON."""
    try:
        value = read_json(answer)
    except ValueError:
        return ""
    for name in ("error", "message", "detail"):
        while isinstance(value, dict) and name in value:
            value = value[name]
    return f" ({shown(value, quotes=False)})" if isinstance(value, str) else ""


def shown(text: str, quotes: bool = True) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    line = line if len(line) <= 200 else line[:200] + "..."
    return repr(line) if quotes else line


def check_url(url: str) -> None:
    """Raise ValueError for a URL that is not one of a server, or that holds a password."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if "@" in url:
        raise ValueError("url must not hold a name or password; use token_env")
    if not good or re.search(r"[^!-~]", url):
        raise ValueError(f"url must be like http://127.0.0.1:8000, not {url!r}")
    if parts.query or parts.fragment:
        raise ValueError(f"url must end before ? and #, not be {url!r}")
