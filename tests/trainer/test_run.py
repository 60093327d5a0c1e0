"""Small real runs on the embedded model: what they write, what they change, and what they do not depend on."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from sfgrpo.export import file_hash
from sfgrpo.prompts import pick_prompts
from sfgrpo.rewards import Scores
from sfgrpo_trainer.cli import main
from sfgrpo_trainer.config import load_config
from sfgrpo_trainer.prepare import prepare
from sfgrpo_trainer.run import Run, train
from sfgrpo_trainer.sample import main as sample

STEPS = 4
ROUNDING = 2e-5
"""The last step with noise has a std of 0.005 here, which magnifies the rounding of a velocity 120 times."""
WITHOUT_EFFECT = "transformer_blocks.2.attn.add_q_proj.lora_B"
"""The last block of SD3 drops what its context tokens attend to, so that their queries have no gradient."""


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(row: dict) -> list[float]:
    return [x for value in row.values() for x in (value if isinstance(value, list) else [value])]


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def apart(one: Path, two: Path) -> float:
    """Largest difference of two LoRA files."""
    a, b = load_file(one), load_file(two)
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.fixture
def config(tmp_path, write_run):
    """`config(*overrides)`: settings of the small run."""
    file = write_run(tmp_path)
    return lambda *overrides: load_config(file, list(overrides))


def iterate(run: Run, iterations: int = 2) -> list[dict]:
    """Only the iterations of a run, without evaluations and files; returns their metrics."""
    done = []
    for i in range(iterations):
        index = pick_prompts(len(run.prepared.prompts), run.config.prompts.per_iteration, i, run.config.seed)
        done.append(run.loop.iterate(i, run.prompts, index).metrics)
    return done


def smooth(images, prompts, metadata) -> Scores:
    """A reward that rounding cannot make jump: redness."""
    red = (images[:, 0] - images[:, 1:].mean(1)).flatten(1).mean(1).cpu()
    return Scores(red, {"red": red})


def test_the_files_of_a_run(finished):
    names = {str(p.relative_to(finished.out)) for p in finished.out.rglob("*") if p.is_file()}
    plots = {n for n in names if n.startswith("plots")}
    samples = {f"samples/{i:05d}{kind}.png" for i in (0, 2, 3) for kind in ("", "_rollout")} - {
        "samples/00000_rollout.png"
    }
    assert plots >= {"plots/reward.png", "plots/gains.png", "plots/update.png", "plots/look.png"}
    assert names - plots - samples == {
        "config.toml",
        "metrics.jsonl",
        "evals.jsonl",
        "best.safetensors",
        "last.safetensors",
        "report.html",
        "before_after.png",
    }
    for name in samples | plots | {"before_after.png"}:
        with Image.open(finished.out / name) as image:
            image.load()


def test_what_a_run_prints(finished):
    process, evals = finished.process, rows(finished.out / "evals.jsonl")
    assert "3 iterations in 0 min" in process.stdout
    assert f"report   {Path('a & b') / 'report.html'}" in process.stdout
    rounding = rows(finished.out / "metrics.jsonl")[0]["ratio/rounding"]
    assert f"rollout and update agree to {rounding:.1e} in log-probability" in process.stdout
    for name in ("jpeg_size", "shapes/tag1"):
        change = f"{evals[0]['scores'][name]:.3f} -> {evals[-1]['scores'][name]:.3f}"
        [line] = [line for line in process.stdout.splitlines() if line.split()[:1] == [name]]
        assert change in line
    # Nothing but the progress bar.
    lines = [line for line in re.split(r"[\r\n]", process.stderr) if line.strip()]
    assert all("/3 [" in line for line in lines) and "3/3" in lines[-1]


def test_metrics_have_the_documented_keys_and_finite_values(finished):
    metrics = rows(finished.out / "metrics.jsonl")
    assert [row["iteration"] for row in metrics] == [0, 1, 2]
    documented = {"iteration", "lr", "reward", "reward_std", "gain", "gain_abs", "dead_groups", "dropped_rewards"}
    documented |= {"ratio/rounding", "ratio/mean", "ratio/max", "clipped", "loss", "grad_norm", "updates"}
    documented |= {"updates_skipped", "brightness", "sharpness", "diversity"}
    documented |= {f"reward/{name}{end}" for name in ("jpeg_size", "shapes") for end in ("", "_std")}
    documented |= {f"seconds/{phase}" for phase in ("sample", "estimate", "score", "update")}
    for row in metrics:
        assert row.keys() == documented
        assert all(math.isfinite(x) for x in numbers(row))
        assert len(row["gain"]) == len(row["gain_abs"]) == STEPS
        assert all(size >= abs(mean) for mean, size in zip(row["gain"], row["gain_abs"], strict=True))
        assert row["ratio/rounding"] <= ROUNDING
        assert row["ratio/mean"] == row["ratio/max"] == 1 and row["clipped"] == 0
        assert row["updates"] == 1 and row["updates_skipped"] == row["dropped_rewards"] == row["dead_groups"] == 0
        assert row["lr"] == 1e-3 and row["grad_norm"] > 0
        total = -row["reward/jpeg_size"] + 0.5 * row["reward/shapes"]
        assert row["reward"] == pytest.approx(total, rel=1e-5)


def test_evaluations_hold_scores_by_tag_and_counts(finished):
    evals = rows(finished.out / "evals.jsonl")
    assert [row["iteration"] for row in evals] == [0, 2, 3]
    for row in evals:
        scores, counts = row["scores"], row["counts"]
        assert (
            scores.keys()
            == counts.keys()
            == {f"{name}{tag}" for name in ("total", "jpeg_size", "shapes") for tag in ("", "/tag0", "/tag1")}
        )
        for name in ("total", "jpeg_size", "shapes"):
            assert (counts[name], counts[f"{name}/tag0"], counts[f"{name}/tag1"]) == (4, 2, 2)
            assert scores[name] == pytest.approx((scores[f"{name}/tag0"] + scores[f"{name}/tag1"]) / 2)
        assert scores["total"] == pytest.approx(-scores["jpeg_size"] + 0.5 * scores["shapes"], rel=1e-5)


def test_the_saved_settings_are_those_of_the_run(finished):
    overrides = ["--iterations", "3"]
    assert load_config(finished.out / "config.toml") == load_config(finished.file, overrides)


def test_the_saved_loras(finished):
    evals = rows(finished.out / "evals.jsonl")
    for name in ("best", "last"):
        path = finished.out / f"{name}.safetensors"
        said, state = metadata(path), load_file(path)
        best = max(evals[1:], key=lambda row: row["scores"]["total"])["iteration"]
        assert said["iteration"] == str(best if name == "best" else 3)
        assert (said["base_model"], said["rank"]) == ("shapes", "4")
        assert said["prompts_sha256"] == file_hash(finished.file.parent / "prompts.jsonl")
        # What is passed on names files without the folders of this machine.
        here = str(finished.file.parent)
        assert said["config"] == (finished.out / "config.toml").read_text().replace(f"{here}/", "")
        assert here not in said["config"]
        assert said["software"].startswith("stepwise-grpo ")
        assert {k.rsplit(".", 2)[1] for k in state} == {"lora_A", "lora_B"}
        assert all(v.dtype == torch.float32 and v.isfinite().all() for v in state.values())
        # Every factor was trained: B left its zeros.
        assert {k for k, v in state.items() if not v.any()} == {"transformer." + WITHOUT_EFFECT + ".weight"}


def test_the_saved_lora_is_what_was_evaluated_at_the_end(config, tmp_path):
    """`sfgrpo sample` with the file of a run gives the images of its last evaluation."""
    out = tmp_path / "out"
    train(config("--eval.steps=6"), out)
    arguments = ["--steps=6", "--dtype=fp32", "--device=cpu", f"--prompts={tmp_path / 'prompts.jsonl'}"]
    sample([*arguments, f"--lora={out / 'last.safetensors'}", f"--out={tmp_path / 'with'}"])
    sample([*arguments, f"--out={tmp_path / 'without'}"])
    with Image.open(out / "samples" / "00002.png") as a, Image.open(tmp_path / "with" / "grid.png") as b:
        assert a.tobytes() == b.tobytes()
    with Image.open(out / "samples" / "00000.png") as a, Image.open(tmp_path / "without" / "grid.png") as b:
        assert a.tobytes() == b.tobytes()


def test_only_the_lora_changes(config, tmp_path):
    run = Run(prepare(config(), tmp_path / "out"))
    parameters = dict(run.family.transformer.named_parameters())
    everything = parameters | {f"vae.{n}": p for n, p in run.family.pipeline.vae.named_parameters()}
    before = {n: p.detach().clone() for n, p in everything.items()}
    assert run.family.pipeline.text_encoder is None  # freed
    # A run outlives its prompt file, and its LoRA names the file that it was trained on.
    prompts = file_hash(tmp_path / "prompts.jsonl")
    (tmp_path / "prompts.jsonl").unlink()
    run.train()
    assert metadata(tmp_path / "out" / "last.safetensors")["prompts_sha256"] == prompts
    lora = {n for n in parameters if "lora_" in n}
    changed = {n for n, p in everything.items() if not torch.equal(p, before[n])}
    assert lora - changed == {WITHOUT_EFFECT + ".default.weight"} and changed < lora
    assert {n for n, p in everything.items() if p.requires_grad} == lora
    trained = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert trained == {id(parameters[n]) for n in lora}
    # And the weights are those of the folder.
    base = load_file(Path(run.config.model_path) / "transformer" / "diffusion_pytorch_model.safetensors")
    here = {n.replace(".base_layer", ""): p for n, p in run.family.transformer.state_dict().items()}
    assert all(torch.equal(here[name], value.float()) for name, value in base.items())


def test_a_seed_gives_the_same_files_and_another_gives_others(config, tmp_path):
    for number, name in enumerate(("one", "two")):
        torch.manual_seed(number)  # the global generator has no part in it
        train(config(), tmp_path / name)
    for file in ("last", "best"):
        one, two = (tmp_path / name / f"{file}.safetensors" for name in ("one", "two"))
        assert apart(one, two) == 0 and metadata(one) == metadata(two)
    one, two = (
        [{k: v for k, v in row.items() if "seconds" not in k} for row in rows(tmp_path / name / "metrics.jsonl")]
        for name in ("one", "two")
    )
    assert one == two
    assert (tmp_path / "one" / "evals.jsonl").read_text() == (tmp_path / "two" / "evals.jsonl").read_text()
    other = Run(prepare(config("--seed=1"), tmp_path / "other"))
    iterate(other)
    assert apart(tmp_path / "one" / "last.safetensors", other.save("last", 2)) > 1e-4


def test_results_depend_on_no_batch_size_and_on_no_checkpointing(config, tmp_path):
    variants = {
        "whole": [],
        "parts": [
            "--grpo.rollout-batch=2",
            "--grpo.estimate-batch=3",
            "--grpo.decode-batch=5",
            "--grpo.update-batch=7",
        ],
        "checkpointed": ["--model.gradient-checkpointing=true"],
    }
    rewards, files = {}, {}
    for name, overrides in variants.items():
        common = ["--grpo.substeps=2", "--grpo.kl-weight=0.01", "--grpo.updates=2"]
        run = Run(prepare(config(*common, *overrides), tmp_path / name))
        run.loop.score = smooth
        # No division by a gradient's own size, which is 0 up to rounding for some entries.
        run.loop.optimizer = torch.optim.SGD(run.policy.trainable_parameters(), lr=0.1)
        rewards[name] = [metrics["reward"] for metrics in iterate(run)]
        files[name] = run.save("last", 2)
    learned = {k: v for k, v in load_file(files["whole"]).items() if "lora_B" in k}
    size = max(float(v.abs().max()) for v in learned.values())
    assert size > 1e-2
    for name in ("parts", "checkpointed"):
        assert apart(files["whole"], files[name]) < 3e-3 * size  # see ROUNDING
        assert rewards[name] == pytest.approx(rewards["whole"], abs=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_runs_are_finite(config, tmp_path, dtype):
    run = Run(prepare(config(f"--model.dtype={dtype}"), tmp_path / "out"))
    assert {p.dtype for n, p in run.family.transformer.named_parameters() if "lora_" not in n} == {
        {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    }
    assert {p.dtype for p in run.policy.trainable_parameters()} == {torch.float32}
    run.train()
    metrics = rows(tmp_path / "out" / "metrics.jsonl")
    assert all(math.isfinite(x) for row in metrics for x in numbers(row))
    assert sum(row["updates"] for row in metrics) >= 1  # fp16 may skip one to find its loss scale
    # With one update an iteration the policy is that of the rollout, whatever the rounding.
    assert all(row["ratio/mean"] == row["ratio/max"] == 1 and row["clipped"] == 0 for row in metrics)
    state = load_file(tmp_path / "out" / "last.safetensors")
    assert all(v.dtype == torch.float32 and v.isfinite().all() for v in state.values())
    assert any(v.any() for k, v in state.items() if "lora_B" in k)


def test_guidance_is_in_rollout_update_and_evaluation(config, tmp_path):
    metrics, drawn = {}, {}
    for name, overrides in {
        "plain": [],
        "guided": ["--sampling.guidance=2"],
        "guided, but not evaluated so": ["--sampling.guidance=2", "--eval.guidance=1"],
    }.items():
        # Without the step of least noise, where rounding counts most.
        run = Run(prepare(config("--grpo.window-stop=2", *overrides), tmp_path / name))
        (run.out / "samples").mkdir()
        drawn[name] = run.evaluate(0).images
        metrics[name] = iterate(run)
    plain, guided, other = metrics.values()
    for row in guided:
        assert row["ratio/rounding"] <= 1e-6 and row["grad_norm"] > 0
        assert all(math.isfinite(x) for x in numbers(row))
    for one, two, three in zip(plain, guided, other, strict=True):
        assert abs(one["brightness"] - two["brightness"]) > 1e-4
        assert all(two[key] == pytest.approx(three[key], rel=1e-4) for key in ("reward", "grad_norm"))
    plain, guided, other = drawn.values()
    assert (guided - plain).abs().max() > 0.01 and (other - plain).abs().max() < 1e-5


def test_the_ema_is_what_is_saved_and_evaluated(config, tmp_path):
    settings = config("--lora.ema-decay=0.3", "--grpo.updates=2", "--iterations=3", "--optimizer.lr=1e-2")
    run = Run(prepare(settings, tmp_path / "out"))
    names = [n for n, p in run.family.transformer.named_parameters() if p.requires_grad]

    def now():
        parameters = dict(run.family.transformer.named_parameters())
        return {n: parameters[n].detach().double() for n in names}

    history = [now()]
    update = run.loop.after_update
    run.loop.after_update = lambda: (history.append(now()), update())
    iterate(run, 3)
    assert len(history) == 1 + 2 * 3
    average = history[0]
    for n, weights in enumerate(history[1:], start=1):
        decay = min(0.3, (1 + n) / (10 + n))
        average = {k: decay * average[k] + (1 - decay) * weights[k] for k in names}
    saved = load_file(run.save("last", 3))
    scale = 12.0 / 4
    for name in names:
        key = f"transformer.{name.replace('.default', '')}"
        expected, raw = (w[name] * (scale if "lora_B" in name else 1) for w in (average, history[-1]))
        torch.testing.assert_close(saved[key].double(), expected, rtol=0, atol=1e-6)
        assert (saved[key] - raw).abs().max() > 1e-5 or WITHOUT_EFFECT.removesuffix(".lora_B") in name
    # The raw weights go on being trained.
    assert all(torch.equal(v, history[-1][k]) for k, v in now().items())


def test_the_learning_rate_warms_up_and_then_falls(config, tmp_path):
    """Without either it stays: test_metrics_have_the_documented_keys_and_finite_values."""
    overrides = ("--optimizer.warmup=2", "--optimizer.final-lr=0.25", "--iterations=6", "--eval.every=6")
    train(config(*overrides), tmp_path / "out")
    lr = [row["lr"] for row in rows(tmp_path / "out" / "metrics.jsonl")]
    assert lr == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_a_time_limit_ends_a_run_in_good_order(config, tmp_path):
    """Nor is in it what a run left that was stopped before its first iteration."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evals.jsonl").write_text(
        '{"iteration": 0, "scores": {"total": 9.0}, "counts": {"total": 1}}\n'
    )
    result = train(config("--max-minutes=1e-9", "--iterations=100", "--save-every=50"), tmp_path / "out")
    assert result.iterations == 1 and len(rows(tmp_path / "out" / "metrics.jsonl")) == 1
    assert metadata(tmp_path / "out" / "last.safetensors")["iteration"] == "1"
    evals = rows(tmp_path / "out" / "evals.jsonl")
    assert [row["iteration"] for row in evals] == [0, 1] and evals[0]["scores"]["total"] < 0
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_run_goes_on_from_a_lora(config, tmp_path):
    first = Run(prepare(config(), tmp_path / "one"))
    iterate(first)
    (first.out / "samples").mkdir()
    before, file = first.evaluate(2), first.out / "best.safetensors"
    run = Run(prepare(config(f"--lora.continue-from={file}", "--lora.alpha=4"), tmp_path / "two"))
    assert apart(file, run.save("again", 0)) < 1e-6
    (run.out / "samples").mkdir()
    torch.testing.assert_close(run.evaluate(0).images, before.images, rtol=0, atol=1e-4)
    assert iterate(run)[0]["grad_norm"] > 0


def test_tensorboard_events_are_written(config, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(config("--tensorboard=true"), tmp_path / "out")
    events = EventAccumulator(str(tmp_path / "out")).Reload()
    metrics = rows(tmp_path / "out" / "metrics.jsonl")
    scalars = {name for name, value in metrics[0].items() if not isinstance(value, list)}
    assert set(events.Tags()["scalars"]) == scalars
    assert [e.value for e in events.Scalars("reward")] == pytest.approx([row["reward"] for row in metrics])


def test_the_random_model_trains_with_its_t5_and_at_another_size(config, tmp_path, random_sd3):
    result = train(
        config(
            f"--model.path={random_sd3.path}",
            "--model.max-sequence-length=24",
            "--sampling.width=48",
            "--rewards={jpeg_size = -1}",  # the shapes are checked at 32 x 32 alone
            "--lora.targets=all",
        ),
        tmp_path / "out",
    )
    assert result.end.images.shape == (4, 3, 32, 48)
    metrics = rows(tmp_path / "out" / "metrics.jsonl")
    assert all(row["ratio/rounding"] <= ROUNDING and row["grad_norm"] > 0 for row in metrics)
    assert metadata(tmp_path / "out" / "last.safetensors")["base_model"] == random_sd3.path.name


def test_uniform_credit_with_the_flow_grpo_kernel_runs(config, tmp_path):
    train(config("--grpo.kernel.name=flow_grpo", "--grpo.credit=uniform"), tmp_path / "out")
    for row in rows(tmp_path / "out" / "metrics.jsonl"):
        assert "gain" not in row and all(math.isfinite(x) for x in numbers(row))
        assert row["grad_norm"] > 0
    assert (tmp_path / "out" / "report.html").is_file()


def test_ctrl_c_saves_the_lora_and_exits_with_130(tmp_path, write_run):
    write_run(tmp_path)
    arguments = ["train", "run.toml", "--out", "out", "--iterations", "100000", "--save-every", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sfgrpo_trainer.cli", *arguments, "--eval.every", "100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background of a shell, SIGINT is ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        log = tmp_path / "out" / "metrics.jsonl"
        give_up = time.monotonic() + 600
        while not (log.exists() and log.read_text().count("\n") >= 2):
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert stderr.rstrip().endswith("sfgrpo: interrupted") and "Traceback" not in stderr
    last = tmp_path / "out" / "last.safetensors"
    done = len(rows(log))
    assert int(metadata(last)["iteration"]) in (done - 1, done) and load_file(last)
    assert "stopped; the LoRA so far is in" in stdout
    assert os.listdir(tmp_path / "out" / "samples") == ["00000.png"]


@pytest.mark.parametrize("rising", (True, False))
def test_best_is_written_only_where_an_evaluation_beats_the_start(config, tmp_path, rising):
    totals = iter((0.5, 0.75, 0.25) if rising else (0.5, 0.5, 0.0))
    run = Run(prepare(config("--iterations=2", "--eval.every=1"), tmp_path / "out"))

    def scripted(images, prompts, metadata) -> Scores:
        red = torch.full((len(images),), run.scripted)
        return Scores(red, {"red": red})

    evaluate = run.evaluate

    def next_total(iteration):
        run.scripted = next(totals)
        return evaluate(iteration)

    run.eval_score, run.evaluate, run.watched = scripted, next_total, {}
    result = run.train()
    page = (run.out / "report.html").read_text()
    assert result.best_iteration == (1 if rising else None)
    assert (run.out / "best.safetensors").exists() == rising and (run.out / "last.safetensors").exists()
    assert ("No evaluation was better than the one at the start" in page) == (not rising)
    assert ("best (iteration 1)" if rising else "best (the start)") in page


def test_the_end_says_where_nothing_beat_the_start(write_run, tmp_path, capsys):
    file = write_run(tmp_path)
    main(["train", str(file), "--out", str(tmp_path / "out"), "--optimizer.lr=1e-12", "--iterations=1"])
    said, best = capsys.readouterr().out, (tmp_path / "out" / "best.safetensors").exists()
    assert ("no best.safetensors" in said) != best and ("(best, iteration 1)" in said) == best
