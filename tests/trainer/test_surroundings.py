"""What surrounds a run spoils it not: readers that go away, signals, a second run, disks that are full."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from sfgrpo_trainer.lock import FolderLock

REWARD = '''
import resource
import time
from pathlib import Path

log = Path("out/metrics.jsonl")

def bright(images, prompts, metadata):
    return images.flatten(1).mean(1)

def sleepy(images, prompts, metadata):
    # Before config.toml is there, the reward is only tried with grey images.
    if not Path("out/config.toml").exists() or (Path("awake").exists() and not log.exists()):
        return bright(images, prompts, metadata)
    Path("asleep").touch()
    time.sleep(600)

def eventless(images, prompts, metadata):
    """The file of TensorBoard's events becomes one that cannot be written."""
    for events in Path("out").glob("events.*"):
        if log.exists() and events.is_file():
            events.unlink()
            events.mkdir()
    return bright(images, prompts, metadata)

def filling(images, prompts, metadata):
    if log.exists() and log.read_text().count("\\n") == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 100,) * 2)
    return bright(images, prompts, metadata)
'''


@pytest.fixture
def start(tmp_path, write_run):
    """`start(reward, *arguments, **popen)`: a run in ./out as a process of its own, killed at the end."""
    write_run(tmp_path)
    (tmp_path / "own.py").write_text(REWARD)
    started = []

    def run(reward: str, *arguments: str, **popen) -> subprocess.Popen:
        rewards = f'{{own = {{kind = "own.py:{reward}", weight = 1.0}}}}'
        command = [sys.executable, "-m", "sfgrpo_trainer.cli", "train", "run.toml", "--rewards", rewards]
        popen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | popen
        popen.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        env = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen([*command, "--out", "out", *arguments], cwd=tmp_path, env=env, **popen))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def until(there, process: subprocess.Popen) -> None:
    give_up = time.monotonic() + 300
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.05)


def rows(file: Path) -> list[dict]:
    """Every line; an unfinished one would raise."""
    text = file.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def iteration(file: Path) -> int:
    assert load_file(file)
    with safe_open(file, "pt") as opened:
        return int(opened.metadata()["iteration"])


@pytest.mark.parametrize("kind", ["pipe", "terminal", "closed"])
def test_a_run_goes_on_when_nobody_reads_it(kind, start, tmp_path):
    evaluated = tmp_path / "out" / "evals.jsonl"
    if kind == "closed":

        def shut():
            os.close(1)
            os.close(2)

        process = start("bright", stdout=None, stderr=None, preexec_fn=shut)
    else:
        ends = [os.pipe(), os.pipe()] if kind == "pipe" else [pty.openpty()]
        if kind == "terminal":
            read, write, error = ends[0][0], ends[0][1], ends[0][1]
            readers = [read]
        else:
            (read, write), (other, error) = ends
            readers = [read, other]
        process = start("bright", stdout=write, stderr=error)
        for number in {write, error}:
            os.close(number)
        until(evaluated.exists, process)
        for number in readers:
            os.close(number)
    assert process.wait(300) == 0
    assert len(rows(tmp_path / "out" / "metrics.jsonl")) == len(rows(evaluated)) == 2
    assert (tmp_path / "out" / "report.html").exists() and iteration(tmp_path / "out" / "last.safetensors") == 2


def test_commands_whose_reader_has_gone_are_quiet(tmp_path):
    sfgrpo = f"{sys.executable} -m sfgrpo_trainer.cli"
    for command, code in (("train --help | head -n 1", 0), ("--version >&-", 0), ("nonsense >&- 2>&-", 2)):
        script = f"set -o pipefail; {sfgrpo} {command}"
        process = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert process.returncode == code and process.stderr == "", (command, process)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_command_whose_output_cannot_be_written_fails(tmp_path):
    """What a run prints is beside its work; what these print is theirs."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sfgrpo_trainer.cli", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "sfgrpo: error: cannot write the output: No space left on device\n"


def test_sigterm_in_the_second_iteration_saves_the_first(start, tmp_path):
    (tmp_path / "awake").touch()
    process = start("sleepy", "--iterations", "3", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    until((tmp_path / "asleep").exists, process)
    process.send_signal(signal.SIGHUP)  # ignored, as under nohup
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert stderr.rstrip().endswith("sfgrpo: stopped by SIGTERM") and "Traceback" not in stderr
    assert "stopped; the LoRA so far is in" in stdout
    assert iteration(tmp_path / "out" / "last.safetensors") == len(rows(tmp_path / "out" / "metrics.jsonl")) == 1
    assert (tmp_path / "out" / "report.html").exists() and not (tmp_path / "out" / ".lock").exists()


def test_one_run_at_a_time_in_a_folder(start, tmp_path):
    first = start("sleepy")
    until((tmp_path / "asleep").exists, first)
    before = sorted((tmp_path / "out").rglob("*"))
    second = start("bright")
    stderr = second.communicate(timeout=300)[1]
    assert second.returncode == 2 and f"in use by another run (process {first.pid} on " in stderr, stderr
    assert sorted((tmp_path / "out").rglob("*")) == before
    first.send_signal(signal.SIGHUP)
    stdout, stderr = first.communicate(timeout=60)
    assert first.returncode == 129, stderr
    assert "stopped before the first iteration ended; there is nothing to save" in stdout


@pytest.mark.parametrize("child", [False, True])
def test_a_killed_process_holds_no_folder(tmp_path, child):
    """Nor does a child that it has forked, as workers of a reward are, and that lives on."""
    script = (
        "import os, time; from pathlib import Path; from sfgrpo_trainer.lock import FolderLock\n"
        f"FolderLock(Path('run')).take(); forked = os.fork() if {child} else -1\n"
        "print(forked, flush=True) if forked else None; time.sleep(600 if forked else 20)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    forked = int(process.stdout.readline())
    with FolderLock(tmp_path / "run") as lock, pytest.raises(Exception, match=f"process {process.pid} on"):
        lock.take()
    process.kill()
    process.wait()
    if child:
        os.kill(forked, 0)  # it lives
    with FolderLock(tmp_path / "run") as lock:
        lock.take()
    assert not list((tmp_path / "run").iterdir())
    if child:
        os.kill(forked, signal.SIGKILL)


def test_a_second_signal_ends_at_once(tmp_path):
    script = (
        "import os, signal; from sfgrpo_trainer.signals import Stopped, stop_on_signals\n"
        "with stop_on_signals():\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    except Stopped as stop: print(stop.code, flush=True); signal.raise_signal(signal.SIGINT)\n"
        "print('went on')"
    )
    start_as_usual = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, preexec_fn=start_as_usual, timeout=60
    )
    assert (process.returncode, process.stdout) == (130, "143\n"), process.stderr


def test_a_second_signal_while_it_saves_leaves_whole_files(start, tmp_path):
    (tmp_path / "awake").touch()
    process = start("sleepy", "--iterations", "3")
    until((tmp_path / "asleep").exists, process)
    process.send_signal(signal.SIGTERM)
    # The report, which takes longest, is still to be written.
    until((tmp_path / "out" / "last.safetensors").exists, process)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and "Traceback" not in stderr, stderr
    assert iteration(tmp_path / "out" / "last.safetensors") == len(rows(tmp_path / "out" / "metrics.jsonl")) == 1


def test_two_demos_at_once(tmp_path):
    command = [sys.executable, "-m", "sfgrpo_trainer.cli", "demo"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until((tmp_path / "runs" / "demo" / "config.toml").exists, first)
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert second.returncode == 2 and f"in use by another run (process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=120)
        assert first.returncode == 143
    finally:
        first.kill()
        first.wait()


def is_one_sentence(process: subprocess.Popen, *words: str) -> str:
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" not in stderr, stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("sfgrpo: error: cannot write ")]
    assert all(word in line for word in words), line
    return stdout


def test_a_row_is_written_whole_or_not_at_all(start, tmp_path):
    process = start("filling", "--iterations", "9", "--save-every", "1", "--eval.every", "9")
    stdout = is_one_sentence(process, "metrics.jsonl: File too large", "last.safetensors and the rows written before")
    assert "stopped; the LoRA so far could not be saved" in stdout
    out = tmp_path / "out"
    assert len(rows(out / "metrics.jsonl")) == 2 and iteration(out / "last.safetensors") == 2
    assert not list(out.rglob("*.part"))


def test_events_of_tensorboard_that_cannot_be_written(start, tmp_path):
    pytest.importorskip("tensorboard")
    process = start("eventless", "--tensorboard", "true")
    is_one_sentence(process, "events.out.tfevents: Is a directory", "last.safetensors", "are whole")
    assert len(rows(tmp_path / "out" / "metrics.jsonl")) == 2 and iteration(tmp_path / "out" / "last.safetensors") == 2


def test_a_full_disk_and_a_folder_that_goes(start, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600m", "none", out], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        process = start("bright", "--iterations", "500", "--save-every", "1", "--eval.every", "2")
        log = out / "metrics.jsonl"
        until(lambda: log.exists() and log.read_text().count("\n") >= 2, process)
        used = os.statvfs(out)
        pages = used.f_blocks - used.f_bfree + 8
        subprocess.run(["mount", "-o", f"remount,size={pages * used.f_frsize}", out], check=True)
        is_one_sentence(process, "No space left on device", "are whole")
        assert rows(log) and rows(out / "evals.jsonl") and iteration(out / "last.safetensors")
        assert not list(out.rglob("*.part"))
    finally:
        subprocess.run(["umount", "-l", out], check=True)


def test_a_folder_that_is_deleted(start, tmp_path):
    process = start("bright", "--iterations", "500", "--eval.every", "500")
    log = tmp_path / "out" / "metrics.jsonl"
    until(log.exists, process)
    shutil.rmtree(tmp_path / "out")
    is_one_sentence(process, "No such file or directory", "the folder is gone")
