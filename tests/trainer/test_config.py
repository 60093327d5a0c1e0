"""Run files and overrides: what is read, what is refused and how."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

import sfgrpo_trainer.runs
from sfgrpo.alarms import AlarmConfig
from sfgrpo.kernels import Kernel
from sfgrpo.rewards import FailurePolicy
from sfgrpo.shapes import MODEL_DIR
from sfgrpo_trainer.config import (
    EvalConfig,
    GRPOConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PromptsConfig,
    RunConfig,
    SamplingConfig,
    field_names,
    load_config,
    parse_overrides,
    to_toml,
)
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.hints import OURS, THEIRS, hint
from sfgrpo_trainer.prepare import prepare
from sfgrpo_trainer.run import train

RUNS = Path(sfgrpo_trainer.runs.__file__).parent
MINIMAL = '[model]\npath = "shapes"\n[prompts]\nfile = "p.txt"\n[rewards]\nshapes = 1.0\n'


@pytest.fixture
def minimal(tmp_path) -> Path:
    """A run file with only what it must have."""
    (tmp_path / "run.toml").write_text(MINIMAL)
    return tmp_path / "run.toml"


def test_defaults_are_those_of_the_classes(minimal, tmp_path):
    assert load_config(minimal) == RunConfig(
        model=ModelConfig(path="shapes"), prompts=PromptsConfig(file=tmp_path / "p.txt"), rewards={"shapes": 1.0}
    )


@pytest.mark.parametrize("file", sorted(RUNS.glob("*.toml")), ids=lambda f: f.name)
def test_the_shipped_run_files_load_and_can_be_prepared(file, tmp_path):
    config = load_config(file)
    assert config.model_path == str(MODEL_DIR)
    assert config.prompts.file.parent == config.eval.file.parent == RUNS
    prepared = prepare(replace(config, model=replace(config.model, device="cpu")), tmp_path / "out")
    assert len(prepared.prompts) == len(config.prompts.file.read_text().splitlines())
    assert prepared.eval_prompts and list((tmp_path / "out").iterdir()) == []


def test_there_is_a_demo():
    assert (RUNS / "demo.toml").is_file()


# Every setting once, none of them at its default.
CHANGED = RunConfig(
    model=ModelConfig(
        path="owner/name",
        dtype="fp16",
        device="cuda:1",
        gradient_checkpointing=True,
        max_sequence_length=77,
        transformer_file=Path("/x/t.safetensors"),
        quantize="int8",
        offload_vae=True,
        expert="low",
    ),
    prompts=PromptsConfig(file=Path("/a b/'p\".jsonl"), per_iteration=3),
    rewards={"shapes": 0.25, "jpeg_size": -1.0},
    sampling=SamplingConfig(height=64, width=96, steps=7, guidance=4.5, embedded_guidance=3.0, frames=5),
    grpo=GRPOConfig(
        group_size=5,
        kernel=Kernel(name="flow_grpo", eta=0.25, schedule="constant"),
        window_start=1,
        window_stop=4,
        window_size=2,
        substeps=2,
        credit="gain_gae",
        mix="each",
        gae_lambda=0.5,
        ema_decay=0.25,
        step_weight="std",
        clip_range=1e-4,
        kl_weight=0.04,
        updates=2,
        max_grad_norm=0.5,
        max_skipped=7,
        rollout_batch=6,
        estimate_batch=7,
        decode_batch=5,
        update_batch=9,
        score_ahead=16,
    ),
    lora=LoRAConfig(
        rank=8, alpha=3.0, targets="all", ema_decay=0.75, continue_from=Path("/x/l.safetensors"), save_dtype="bf16"
    ),
    optimizer=OptimizerConfig(lr=1e-5, beta1=0.5, beta2=0.75, eps=1e-6, weight_decay=0.5, warmup=3, final_lr=0.25),
    eval=EvalConfig(
        file=Path("/x/e.txt"),
        rewards={"shapes_strict": 2.0},
        every=3,
        images_per_prompt=2,
        max_prompts=5,
        steps=40,
        guidance=2.0,
        grid=4,
        batch=6,
    ),
    watch={"sharpness": 1.0},
    alarms=AlarmConfig(drop=0.2, rise=0.5, reward_drop=0.25, stop=True),
    failures=FailurePolicy(retries=3, retry_wait=0.5, timeout=60.0, then="stop", max_dropped=0.5),
    iterations=12,
    max_minutes=1.5,
    seed=9,
    save_every=4,
    tensorboard=True,
)


def leaves(config, prefix: str = "") -> dict[str, object]:
    """Dotted name -> value of every setting."""
    out = {}
    for f in fields(config):
        value = getattr(config, f.name)
        out |= leaves(value, f"{prefix}{f.name}.") if is_dataclass(value) else {prefix + f.name: value}
    return out


def test_the_changed_settings_are_all_settings(minimal):
    changed, default = leaves(CHANGED), leaves(load_config(minimal))
    assert list(changed) == field_names(RunConfig)
    assert [name for name in changed if changed[name] == default[name]] == []


def test_to_toml_is_read_back(tmp_path, minimal):
    for config in (CHANGED, load_config(minimal), load_config(RUNS / "demo.toml")):
        file = tmp_path / "again.toml"
        file.write_text(to_toml(config))
        assert load_config(file) == config


def test_each_setting_can_be_overridden(minimal):
    """The same config from a minimal file and the command line alone."""
    arguments = []
    for number, (name, value) in enumerate(leaves(CHANGED).items()):
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict):
            pairs = [(f"{flag}.{key.replace('_', '-')}", str(v)) for key, v in value.items()]
        else:
            pairs = [(flag, str(value).lower() if isinstance(value, bool) else str(value))]
        for key, text in pairs:
            arguments += [f"{key}={text}"] if number % 2 else [key, text]
    assert load_config(minimal, arguments) == CHANGED


def test_overrides_are_parsed_as_toml_or_else_as_text():
    parsed = parse_overrides(
        [
            "--grpo.clip-range",
            "1e-4",
            "--lora.targets=all",
            "--prompts.file=a=b.txt",
            "--rewards.jpeg-size",
            "-2",
            "--eval.rewards.shapes",
            "1",
            "--tensorboard=true",
            "--model.path",
            "'quoted'",
        ]
    )
    assert parsed == {
        "grpo.clip_range": 1e-4,
        "lora.targets": "all",
        "prompts.file": "a=b.txt",
        "rewards.jpeg_size": -2,
        "eval.rewards.shapes": 1,
        "tensorboard": True,
        "model.path": "quoted",
    }


def test_the_last_override_wins_and_rewards_are_added(minimal):
    config = load_config(minimal, ["--seed", "1", "--seed", "2", "--rewards.jpeg-size", "0.5"])
    assert config.seed == 2
    assert config.rewards == {"shapes": 1.0, "jpeg_size": 0.5}
    assert load_config(minimal, ["--rewards", "{jpeg_size = 2}"]).rewards == {"jpeg_size": 2.0}


def test_paths_are_relative_to_the_run_file(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "run.toml"
    file.write_text(
        '[model]\npath = "model"\n[prompts]\nfile = "../p.txt"\n[rewards]\nshapes = 1\n'
        '[eval]\nfile = "sub/e.txt"\n[lora]\ncontinue_from = "/abs/l.safetensors"\n'
    )
    config = load_config("runs/run.toml")
    assert config.prompts.file == tmp_path / "p.txt"
    assert config.eval.file == tmp_path / "runs" / "sub" / "e.txt"
    assert config.lora.continue_from == Path("/abs/l.safetensors")
    assert config.model_path == str(tmp_path / "runs" / "model")
    # A name that is no folder there stays as it is: a hub id.
    assert load_config("runs/run.toml", ["--model.path", "owner/name"]).model_path == "owner/name"
    # A path that is typed is relative to where it is typed.
    assert load_config("runs/run.toml", ["--prompts.file", "q.txt"]).prompts.file == tmp_path / "q.txt"
    assert load_config("runs/run.toml", ["--prompts.file", "~/q.txt"]).prompts.file == Path.home() / "q.txt"


WRONG = {
    "unknown field": (["--lora.ranks", "4"], r"unknown setting --lora\.ranks; did you mean lora\.rank\?"),
    "unknown table": (["--optimiser.lr", "1"], r"unknown setting --optimiser\.lr; did you mean optimizer\.lr\?"),
    "no dashes": (["lora.rank", "4"], r"unexpected argument 'lora\.rank'"),
    "no value": (["--lora.rank"], r"--lora\.rank needs a value"),
    "text for a number": (["--grpo.group-size", "many"], r"grpo\.group_size: .*'many'"),
    "half an image": (["--grpo.group-size", "2.5"], r"grpo\.group_size: .*2\.5"),
    "number for text": (["--model.device", "0"], r"model\.device: .*0"),
    "list for a number": (["--seed", "[1]"], r"seed: .*\[1\]"),
    "dtype": (["--model.dtype", "fp8"], r"model\.dtype: .*'bf16'.*fp8"),
    "targets": (["--lora.targets", "some"], r"lora\.targets: .*'attention_mlp'.*some"),
    "group of one": (["--grpo.group-size", "1"], "grpo: group_size must be 2 or more"),
    "rank 0": (["--lora.rank", "0"], "lora: rank must be 1 or more"),
    "alpha 0": (["--lora.alpha", "0"], "lora: alpha must be above 0"),
    "ema of 1": (["--lora.ema-decay", "1"], "lora: ema_decay must be from 0 to below 1"),
    "eta 2": (["--grpo.kernel.eta", "2"], r"grpo\.kernel: eta of the ddim kernel must be 0 to 1, got 2"),
    "eta 0": (["--grpo.kernel.eta", "0"], "grpo: kernel must be stochastic"),
    "eta nan": (["--grpo.kernel.eta", "nan"], r"grpo\.kernel: eta"),
    "kernel ode": (["--grpo.kernel.name", "ode"], "grpo: kernel must be stochastic"),
    "kernel": (["--grpo.kernel.name", "sde"], r"grpo\.kernel: unknown kernel 'sde'; choose one of ddim"),
    "schedule": (["--grpo.kernel.schedule", "x"], r"grpo\.kernel: unknown schedule 'x'; choose one of as_printed"),
    "credit": (["--grpo.credit", "gains"], "grpo: credit must be one of uniform, gain"),
    "step weight": (["--grpo.step-weight", "x"], "grpo: step_weight must be one of none, std"),
    "substeps": (["--grpo.substeps", "0"], "grpo: substeps must be 1 or more"),
    "clip range": (["--grpo.clip-range", "0"], "grpo: clip_range must be above 0"),
    "kl weight": (["--grpo.kl-weight", "-1"], "grpo: kl_weight must be 0 or more"),
    "updates": (["--grpo.updates", "0"], "grpo: updates must be 1 or more"),
    "many updates": (["--grpo.updates", "9"], "grpo.updates 9 is more than prompts.per_iteration"),
    "batch": (["--grpo.update-batch", "0"], "grpo: update_batch must be 1 or more"),
    "lambda": (["--grpo.gae-lambda", "1.5"], "grpo: gae_lambda must be from 0 to 1"),
    "grad norm": (["--grpo.max-grad-norm", "0"], "grpo: max_grad_norm must be above 0"),
    "one step": (["--sampling.steps", "1"], "sampling: steps must be 2 or more"),
    "guidance": (["--sampling.guidance", "0.5"], r"sampling: guidance must be 1 \(off\) or more"),
    "eval guidance": (["--eval.guidance", "0"], r"eval: guidance must be 1 \(off\) or more"),
    "eval batch": (["--eval.batch", "0"], "eval: batch must be 1 or more"),
    "eval steps": (["--eval.steps", "0"], "eval: steps must be 1 or more"),
    "lr": (["--optimizer.lr", "nan"], "optimizer: lr must be above 0"),
    "warmup": (["--optimizer.warmup", "-1"], "optimizer: warmup must be 0 or more"),
    "final_lr": (["--optimizer.final-lr", "1.1"], "optimizer: final_lr must be from 0 to 1"),
    "per iteration": (["--prompts.per-iteration", "0"], "prompts: per_iteration must be 1 or more"),
    "iterations": (["--iterations", "0"], "iterations must be 1 or more"),
    "minutes": (["--max-minutes", "0"], "max_minutes must be above 0"),
    "reward": (["--rewards.beauty", "1"], "unknown reward 'beauty'; choose one of shapes, shapes_strict, jpeg_size"),
    "eval reward": (["--eval.rewards.beauty", "1"], "unknown reward 'beauty'"),
    "no reward": (["--rewards", "{}"], "rewards names no reward"),
    "reward without weight": (["--rewards.shapes", "much"], r"rewards\.shapes: .*'much'"),
    # What the algorithm or the optimizer would refuse once the model is loaded.
    "window beyond the steps": (["--grpo.window-stop", "11"], "window"),
    "window that is empty": (["--grpo.window-start", "3", "--grpo.window-stop", "3"], "window"),
    "beta1": (["--optimizer.beta1", "1.5"], "beta1"),
    "beta2": (["--optimizer.beta2", "-0.1"], "beta2"),
    "eps": (["--optimizer.eps", "-1"], "eps"),
    "weight decay": (["--optimizer.weight-decay", "-1"], "weight_decay"),
    "T5 tokens": (["--model.max-sequence-length", "-1"], "max_sequence_length"),
    "guidance nan": (["--sampling.guidance", "nan"], "guidance"),
    "weight nan": (["--rewards.shapes", "nan"], "shapes"),
    "weight inf": (["--eval.rewards.shapes", "inf"], r"eval\.rewards\.shapes: the weight must be finite"),
    "all weights 0": (
        ["--rewards.shapes", "0"],
        r"--rewards\.shapes 0: rewards: every weight is 0, so nothing would be",
    ),
    "all eval weights 0": (["--eval.rewards.shapes", "0"], r"eval\.rewards: every weight is 0, .*chosen as best"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused_before_the_model_loads(minimal, tmp_path, arguments, message):
    (tmp_path / "p.txt").write_text("a circle\n")
    with pytest.raises(UserError, match=message) as error:
        prepare(load_config(minimal, ["--model.device=cpu", *arguments]), tmp_path / "out")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--grpo.window-start", "9"],  # the last step is deterministic in every kernel
        ["--grpo.window-stop", "1", "--grpo.kernel.schedule", "as_printed"],  # and there the first is, too
    ],
    ids=["last step", "first step"],
)
def test_a_window_without_noise_is_refused(minimal, tmp_path, arguments):
    (tmp_path / "p.txt").write_text("a circle\n")
    with pytest.raises(UserError, match="window"):
        train(
            load_config(minimal, ["--model.device=cpu", "--sampling.height=32", "--sampling.width=32", *arguments]),
            tmp_path / "out",
        )


FILES = {
    "unknown field": ("[lora]\nrnak = 4\n", r"run\.toml: unknown field lora\.rnak; did you mean lora\.rank\?"),
    "unknown table": ("[loar]\nrank = 4\n", r"run\.toml: unknown field loar"),
    "unknown kernel field": ("[grpo.kernel]\nstrength = 1\n", r"unknown field grpo\.kernel\.strength"),
    "table for a number": ("[lora.rank]\nx = 4\n", r"run\.toml: lora\.rank: "),
    "no TOML": ("[lora\n", r"run\.toml cannot be read: .*line 7"),
    "twice": ("[rewards]\nshapes = 1.0\n", r"run\.toml cannot be read: "),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_wrong_files_are_refused(minimal, text, message):
    minimal.write_text(MINIMAL + text)
    with pytest.raises(UserError, match=message) as error:
        load_config(minimal)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ('path = "shapes"\n', r"field model\.path is missing"),
        ('file = "p.txt"\n', r"field prompts\.file is missing"),
        ('[model]\npath = "shapes"\n', "field model is missing"),
        ("[rewards]\nshapes = 1.0\n", "field rewards is missing"),
        ("shapes = 1.0\n", "rewards names no reward"),
    ],
)
def test_missing_fields_are_named(minimal, gone, message):
    minimal.write_text(MINIMAL.replace(gone, ""))
    with pytest.raises(UserError, match=rf"run\.toml: {message}"):
        load_config(minimal)


def test_a_value_cannot_be_a_table(minimal):
    minimal.write_text("lora = 3\n" + MINIMAL)
    with pytest.raises(UserError, match="lora"):
        load_config(minimal)
    with pytest.raises(UserError, match="lora must be a table"):
        load_config(minimal, ["--lora.rank", "4"])


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    (tmp_path / "folder.toml").mkdir()
    for name, message in (("none", "does not exist"), ("latin", "cannot be read"), ("folder", "cannot be read")):
        with pytest.raises(UserError, match=rf"{name}\.toml {message}"):
            load_config(tmp_path / f"{name}.toml")


def test_the_suggestion_lists_the_tables_where_none_is_close(minimal):
    with pytest.raises(UserError) as error:
        load_config(minimal, ["--zzzzzzzz", "1"])
    for name in field_names(RunConfig):
        assert name.partition(".")[0] in str(error.value)
    with pytest.raises(UserError, match="the settings of lora are lora.rank, lora.alpha, .*train --help"):
        load_config(minimal, ["--lora.zzzzzzzz", "1"])


def test_a_mistake_is_blamed_on_the_override_that_has_it(minimal):
    for arguments, start in (
        (["--seed", "3", "--optimizer.lr", "-1"], "--optimizer.lr -1: optimizer: lr must be"),
        (["--optimizer.lr", "fast"], "--optimizer.lr fast: optimizer.lr: "),
        (
            ["--grpo.updates=3", "--prompts.per-iteration=2"],
            f"{minimal} with --grpo.updates 3 --prompts.per_iteration 2: ",
        ),
    ):
        with pytest.raises(UserError) as error:
            load_config(minimal, arguments)
        assert str(error.value).startswith(start)
    minimal.write_text(MINIMAL + "[optimizer]\nlr = -1\n")
    with pytest.raises(UserError) as error:
        load_config(minimal, ["--seed", "3"])
    assert str(error.value).startswith(f"{minimal}: optimizer: lr must be")
    assert load_config(minimal, ["--optimizer.lr", "1e-4"]).optimizer.lr == 1e-4


def test_watched_rewards_may_weigh_nothing(minimal):
    minimal.write_text(MINIMAL + "[watch]\njpeg_size = 0.0\n")
    assert load_config(minimal).watch == {"jpeg_size": 0.0}


def test_every_hint_names_settings_that_exist():
    for ours in OURS:
        for name in ours.split(" and "):
            assert name in field_names(RunConfig), name
    assert not {name for name in THEIRS if name in field_names(RunConfig)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beta", "here it is grpo.kl_weight"),
        ("train.beta", "here it is grpo.kl_weight"),
        ("sample.noise_level", "here it is grpo.kernel.eta"),
        ("sample.num_image_per_prompt", "here it is grpo.group_size"),
        ("resolution", "here it is sampling.height and sampling.width"),
        ("eval_num_steps", "here it is eval.steps"),
        ("pretrained.model", "here it is model.path"),
        ("optimizer.learning_rate", "here it is optimizer.lr"),
        ("optimizer.beta", "did you mean optimizer.beta"),
        ("steps", "did you mean sampling.steps?"),
        ("lora.rnak", "did you mean lora.rank?"),
        ("loar.rank", "did you mean lora.rank?"),
        ("loar", "did you mean lora?"),
        ("lora.rnk", "did you mean lora.rank?"),
        ("group_size", "did you mean grpo.group_size?"),
        ("qqq.zzz", "the top level has alarms, eval, "),
    ],
)
def test_hints(name, words):
    assert hint(name, field_names(RunConfig)).startswith(f"; {words}")


def test_a_missing_field_is_told_with_the_unknown_ones(minimal):
    minimal.write_text("num_epochs = 3\n" + MINIMAL.replace("[model]", "[pretrained]") + "[train]\nbeta = 0.1\n")
    with pytest.raises(UserError, match=r"field model is missing; unknown field \w+; here it is \w+.*; also unknown: "):
        load_config(minimal)


def test_a_list_of_rewards_is_refused_in_words(minimal):
    minimal.write_text(MINIMAL.replace("[rewards]\nshapes = 1.0", '[[rewards]]\nname = "shapes"'))
    with pytest.raises(UserError, match=r"run\.toml: rewards must be a table, name = weight; got a list$"):
        load_config(minimal)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".py"])
def test_run_files_of_other_kinds_are_refused_by_their_name(tmp_path, suffix):
    file = tmp_path / f"run{suffix}"
    file.write_text("lr: 1\n")
    with pytest.raises(UserError, match=rf"run\{suffix}: a run file is TOML, not {suffix[1:]}"):
        load_config(file)
    file.unlink()
    with pytest.raises(UserError, match="does not exist"):
        load_config(file)
