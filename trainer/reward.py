"""`sfgrpo reward serve` on the command line: which rewards, where, and who may ask."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import signal
from pathlib import Path
from threading import Event, Thread

from sfgrpo.rewards import Mix, check_rewards, mix

from .config import load_rewards
from .errors import UserError
from .serve import RewardServer

LEAST_TOKEN = 16


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sfgrpo reward", description="Rewards for other machines.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve")
    p = commands.add_parser("serve", help="answer the `remote` reward of runs until Ctrl-C")
    p.add_argument("--reward", action="append", metavar="NAME", help="may be given again; of --config, or by its kind")
    p.add_argument("--config", type=Path, metavar="FILE.toml", help="a run file, or one with [rewards] alone")
    p.add_argument("--host", default="127.0.0.1", help="address to listen at; another than loopback needs a token")
    p.add_argument("--port", type=int, default=8190, help="0 takes a free one")
    p.add_argument("--token-env", metavar="VAR", help="environment variable with the token that clients must send")
    p.add_argument("--max-batch", type=int, default=32, help="images of several requests to score together")
    p.add_argument("--max-wait", type=float, default=0.01, help="seconds that a request waits for others")
    p.add_argument("--max-queue", type=int, default=256, help="images that wait; more are told to come back later")
    p.add_argument("--max-request-mb", type=float, default=256, help="of one request; four times that of all together")
    return parser


def main(arguments: list[str]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises UserError."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    for name in ("max_batch", "max_queue", "max_request_mb"):
        if not 0 < getattr(options, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} must be above 0")
    if not 0 <= options.max_wait < float("inf"):
        raise UserError("--max-wait must be 0 seconds or more")
    if not 0 <= options.port < 65536:
        raise UserError("--port must be from 0 to 65535")
    token = _token(options)
    score = _rewards(options)
    try:
        server = RewardServer(
            score,
            options.host,
            options.port,
            token=token,
            max_batch=options.max_batch,
            max_wait=options.max_wait,
            max_queue=options.max_queue,
            max_bytes=int(options.max_request_mb * 1e6),
        )
    except OSError as error:
        raise UserError(f"cannot listen at {options.host}, port {options.port}: {error.strerror or error}") from None
    _until_a_signal(server, score)
    return 0


def _until_a_signal(server: RewardServer, score: Mix) -> None:
    end, before = Event(), {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda *_: end.set())
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    print(f"serving {', '.join(term.name for term in score.terms)} at {server.url}; Ctrl-C ends it", flush=True)
    end.wait()
    for number, handler in before.items():  # A second signal ends it at once.
        signal.signal(number, handler)
    ended = server.stop()
    print("ended", flush=True)
    if not ended:
        os._exit(0)  # The interpreter cannot end in order while a reward computes.


def _token(options: argparse.Namespace) -> str:
    """The token of --token-env, "" for none. Raises UserError where others could ask without one."""
    if options.token_env is None:
        if not _is_loopback(options.host):
            raise UserError(
                f"--host {options.host} lets other machines ask; give --token-env VAR, the name of an environment "
                "variable with a token, or leave --host out"
            )
        return ""
    token = os.environ.get(options.token_env, "").strip()
    if not re.fullmatch(r"[!-~]+", token) or len(token) < LEAST_TOKEN:
        raise UserError(
            f"the environment variable {options.token_env} must hold a token of {LEAST_TOKEN} letters or more, without "
            'spaces; python -c "import secrets; print(secrets.token_urlsafe())" makes one'
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _rewards(options: argparse.Namespace) -> Mix:
    """The rewards to serve, of which files and packages are there. Raises UserError."""
    names = list(dict.fromkeys(options.reward or ()))
    if options.config is not None:
        table = load_rewards(options.config)
        for name in names:
            if name not in table:
                raise UserError(f"{options.config} has no reward {name}; it has {', '.join(table)}")
        table = {name: table[name] for name in names} if names else table
    elif names:
        table = dict.fromkeys(names, 1.0)
    else:
        raise UserError("give --reward NAME, or --config FILE.toml with a table [rewards]")
    for name, value in table.items():
        try:
            mix({name: value})
        except ValueError as error:
            raise UserError(f"{options.config or '--reward'}: {name}: {error}") from None
    score = mix(table)
    try:
        check_rewards(score)
    except ValueError as error:
        raise UserError(str(error)) from None
    return score
