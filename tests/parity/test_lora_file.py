"""LoRA files against diffusers' own loader: what was trained is what `load_lora_weights` gives at strength 1.0."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sfgrpo.export import save_lora
from sfgrpo.kernels import Kernel
from sfgrpo.prompts import Prompt
from sfgrpo.rollout import rollout
from sfgrpo_trainer.config import LoRAConfig
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import LoRAPolicy, add_lora, encode_prompts, load_lora, lora_state, read_lora
from tests.lora_dialects import DIALECTS, sd3_attention, write

PROMPTS = ("a circle", "two red circles")
TARGETS = ("attention", "attention_mlp", "all")
STEPS = 3


def load(model):
    return load_family(
        str(model.path), torch.float32, torch.device("cpu"), max_sequence_length=model.max_sequence_length
    )


def randomise(family, seed: int = 0) -> None:
    """Both factors random, as after training."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in family.transformer.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


def trained(model, targets: str, rank: int = 4, alpha: float = 12.0):
    """A family with a random LoRA whose scale is not 1."""
    family = load(model)
    add_lora(family, LoRAConfig(rank=rank, alpha=alpha, targets=targets), seed=0)
    randomise(family)
    return family


def latents(family, model):
    """What the policy draws for PROMPTS."""
    prompts = [Prompt(text) for text in PROMPTS]
    policy = LoRAPolicy(family, encode_prompts(family, prompts, {0, 1}, False), guidance=1.0, dtype=torch.float32)
    return rollout(
        policy.velocity,
        noise(),
        family.sigmas(STEPS, model.size, model.size),
        torch.arange(2),
        kernel=Kernel(name="ode"),
        generators=[],
    ).final


@pytest.fixture(scope="module")
def base(embedded, random_sd3):
    """`base(model)`: what a stock pipeline draws without a LoRA."""
    drawn = {id(m): stock_latents(m) for m in (embedded, random_sd3)}
    return lambda model: drawn[id(model)]


def noise():
    return torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(11))


def stock_latents(model, file: Path | None = None):
    """What a stock pipeline draws, with or without a LoRA file."""
    without = {} if model.max_sequence_length else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(model.path, torch_dtype=torch.float32, **without)
    pipe.set_progress_bar_config(disable=True)
    if file is not None:
        pipe.load_lora_weights(str(file))
    return pipe(
        list(PROMPTS),
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        max_sequence_length=model.max_sequence_length,
        latents=noise(),
        output_type="latent",
    ).images


@pytest.mark.parametrize("targets", TARGETS)
def test_diffusers_loads_what_was_trained(model, base, targets, tmp_path):
    family = trained(model, targets)
    save_lora(lora_state(family), tmp_path / "lora.safetensors", {"format": "pt"})
    mine = latents(family, model)
    theirs = stock_latents(model, tmp_path / "lora.safetensors")
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert (theirs - base(model)).abs().max() > 0.1  # the LoRA does something


def linears(model) -> dict[str, tuple[int, int]]:
    """Module name -> (in, out) of every linear module of an untouched transformer."""
    transformer = SD3Transformer2DModel.from_pretrained(model.path, subfolder="transformer")
    return {
        n: (m.in_features, m.out_features) for n, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)
    }


@pytest.mark.parametrize("targets", TARGETS)
def test_keys_and_shapes_of_a_file(model, targets, tmp_path):
    family = trained(model, targets)
    save_lora(lora_state(family), tmp_path / "lora.safetensors", {"rank": "4", "base_model": "x"})
    state = load_file(tmp_path / "lora.safetensors")
    modules = linears(model)
    if targets != "all":
        # Everything inside the blocks but the modulations; for `attention` without the MLPs too.
        skipped = ("norm1", "norm1_context") + (("ff", "ff_context") if targets == "attention" else ())
        modules = {
            n: shape
            for n, shape in modules.items()
            if n.startswith("transformer_blocks.") and n.split(".")[2] not in skipped
        }
    wanted = {}
    for name, (inside, outside) in modules.items():
        wanted[f"transformer.{name}.lora_A.weight"] = (4, inside)
        wanted[f"transformer.{name}.lora_B.weight"] = (outside, 4)
    assert {k: tuple(v.shape) for k, v in state.items()} == wanted
    assert not [k for k in state if "alpha" in k]
    with safe_open(tmp_path / "lora.safetensors", "pt") as file:
        assert file.metadata() == {"rank": "4", "base_model": "x"}
    # alpha / rank = 3 stands in B, and A is as it was trained.
    parameters = dict(family.transformer.named_parameters())
    for name in modules:
        a, b = (parameters[f"{name}.lora_{x}.default.weight"] for x in "AB")
        assert torch.equal(state[f"transformer.{name}.lora_A.weight"], a)
        torch.testing.assert_close(state[f"transformer.{name}.lora_B.weight"], 3 * b, rtol=1e-6, atol=0)


def test_default_alpha_is_the_rank(embedded):
    family = load(embedded)
    add_lora(family, LoRAConfig(rank=4), seed=0)
    randomise(family)
    parameters = dict(family.transformer.named_parameters())
    name = "transformer_blocks.1.attn.to_q"
    state = lora_state(family)
    assert torch.equal(state[f"transformer.{name}.lora_B.weight"], parameters[f"{name}.lora_B.default.weight"])


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)], ids=["fp16", "bf16"]
)
def test_half_precision_files_are_within_their_rounding(embedded, base, dtype, rounding, tmp_path):
    family = trained(embedded, "all")
    full = lora_state(family)
    save_lora(lora_state(family, dtype), tmp_path / "lora.safetensors", {})
    state = load_file(tmp_path / "lora.safetensors")
    assert state.keys() == full.keys() and {v.dtype for v in state.values()} == {dtype}
    for name, value in state.items():
        assert (value.float() - full[name]).abs().sub(rounding * full[name].abs()).max() <= 2.0**-24
    exact, theirs = latents(family, embedded), stock_latents(embedded, tmp_path / "lora.safetensors")
    apart, effect = (theirs - exact).abs().max(), (exact - base(embedded)).abs().max()
    assert 0 < apart < 20 * rounding * effect
    other = load(embedded)
    load_lora(other, tmp_path / "lora.safetensors")
    torch.testing.assert_close(latents(other, embedded), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "alpha"), [("attention", 12.0), ("attention", 1.0), ("attention_mlp", 4.0), ("all", 4.0)]
)
def test_training_goes_on_from_a_file(embedded, targets, alpha, tmp_path):
    """The weight change comes back whatever the alpha of the run that goes on."""
    first = trained(embedded, targets)
    path = tmp_path / "lora.safetensors"
    save_lora(lora_state(first), path, {})
    second = load(embedded)
    add_lora(second, LoRAConfig(rank=4, alpha=alpha, targets=targets, continue_from=path), seed=5)
    one, two = (dict(f.transformer.named_parameters()) for f in (first, second))
    assert one.keys() == two.keys()
    for name in one:
        expected = one[name] * (12.0 / alpha) if "lora_B" in name else one[name]
        torch.testing.assert_close(two[name], expected, rtol=1e-6, atol=0)
        assert two[name].requires_grad == ("lora_" in name)
    torch.testing.assert_close(latents(second, embedded), latents(first, embedded), rtol=0, atol=1e-5)
    again = lora_state(second)
    for name, value in lora_state(first).items():
        torch.testing.assert_close(again[name], value, rtol=1e-6, atol=0)


def test_a_half_precision_file_can_be_gone_on_from(embedded, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_lora(lora_state(trained(embedded, "attention"), torch.bfloat16), path, {})
    second = load(embedded)
    add_lora(second, LoRAConfig(rank=4, continue_from=path), seed=0)
    state = load_file(path)
    for name, value in lora_state(second).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[name].float())


@pytest.mark.parametrize("name", ["kohya", "native with alphas", "native peft"])
def test_a_file_of_another_trainer_is_gone_on_from_and_sampled(embedded, base, name, tmp_path):
    """Fused qkv and a scale of its own: the same weights as the same change of weights in this trainer's form."""
    dialect, path = DIALECTS[name], tmp_path / "theirs.safetensors"
    config = json.loads((embedded.path / "transformer" / "config.json").read_text())
    state, meant = write(dialect, sd3_attention(config))
    state = {k: v if k.endswith("alpha") else 0.1 * v for k, v in state.items()}
    save_file(state, path)
    family = load(embedded)
    add_lora(family, LoRAConfig(rank=4, alpha=12.0, continue_from=path), seed=0)
    ours = lora_state(family)
    for block in range(config["num_layers"]):
        for side, parts in (
            ("x_block", ("to_q", "to_k", "to_v")),
            ("context_block", ("add_q_proj", "add_k_proj", "add_v_proj")),
        ):
            whole = 0.01 * meant[f"joint_blocks.{block}.{side}.attn.qkv"]
            for part, rows in zip(parts, whole.chunk(3), strict=True):
                layer = f"transformer.transformer_blocks.{block}.attn.{part}"
                got = ours[f"{layer}.lora_B.weight"] @ ours[f"{layer}.lora_A.weight"]
                torch.testing.assert_close(got, rows, rtol=1e-5, atol=1e-5)
    other = load(embedded)
    load_lora(other, path)
    sampled = latents(other, embedded)
    torch.testing.assert_close(sampled, latents(family, embedded), rtol=0, atol=1e-5)
    assert (sampled - base(embedded)).abs().max() > 0.1


@pytest.fixture
def adapted(embedded):
    """The embedded model with a LoRA of rank 4 on its attention."""
    return trained(embedded, "attention")


def test_a_file_of_another_rank_is_refused(adapted, embedded, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_lora(lora_state(trained(embedded, "attention", rank=2)), path, {})
    with pytest.raises(UserError, match=r"rank 2; set lora\.rank"):
        read_lora(adapted, path)


@pytest.mark.parametrize("targets", ["attention_mlp", "all"])
def test_a_file_for_other_modules_is_refused(adapted, embedded, targets, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_lora(lora_state(trained(embedded, targets)), path, {})
    with pytest.raises(UserError, match=r"other modules than lora\.targets"):
        read_lora(adapted, path)


def test_a_file_for_another_model_is_refused(adapted, embedded, random_sd3, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_lora(lora_state(trained(random_sd3, "attention")), path, {})
    with pytest.raises(UserError, match="lora.safetensors"):
        read_lora(adapted, path)
    with pytest.raises(UserError, match="is for a model of another width"):
        load_lora(load(embedded), path)


class Evil:
    """Something that would run if it were unpickled."""

    def __reduce__(self):
        return (print, ("unpickled",))


def damaged(folder):
    """name -> a file that is no LoRA file."""
    good = {"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(4, 192)}
    save_file(good, folder / "cut.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "cut.safetensors").read_bytes()[:-9])
    (folder / "noise.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "empty.safetensors").write_bytes(b"")
    torch.save(good, folder / "pickle.safetensors")
    (folder / "evil.pt").write_bytes(pickle.dumps(Evil()))
    (folder / "folder.safetensors").mkdir()
    return sorted(folder.iterdir())


def test_damaged_and_pickled_files_are_refused(adapted, embedded, tmp_path, capsys):
    other = load(embedded)
    for path in [*damaged(tmp_path), tmp_path / "missing.safetensors"]:
        before = {k: v.clone() for k, v in lora_state(adapted).items()}
        for read in (lambda p: read_lora(adapted, p), lambda p: load_lora(other, p)):
            with pytest.raises(UserError) as error:
                read(path)
            assert str(path) in str(error.value) and "\n" not in str(error.value)
        assert all(torch.equal(v, before[k]) for k, v in lora_state(adapted).items())
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["weight", "text_encoder.layer.lora_A.weight"])
def test_a_file_without_a_transformer_lora_is_refused(embedded, name, tmp_path):
    save_file({name: torch.zeros(4, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"other\.safetensors"):
        load_lora(load(embedded), tmp_path / "other.safetensors")


def test_a_file_is_written_whole_or_not_at_all(adapted, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_lora(lora_state(adapted), path, {"n": "1"})
    save_lora(lora_state(adapted), path, {"n": "2"})
    assert [p.name for p in tmp_path.iterdir()] == ["lora.safetensors"]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"n": "2"}
    with pytest.raises(OSError):
        save_lora(lora_state(adapted), tmp_path / "no" / "lora.safetensors", {})


def test_initial_values_depend_on_the_seed_alone(embedded):
    states = []
    for seed, disturbance in ((3, 1), (3, 2), (4, 1)):
        family = load(embedded)
        torch.manual_seed(disturbance)
        before = torch.random.get_rng_state()
        add_lora(family, LoRAConfig(rank=4), seed=seed)
        assert torch.equal(before, torch.random.get_rng_state())
        states.append(lora_state(family))
    same, again, other = states
    assert all(torch.equal(same[k], again[k]) for k in same)
    assert all(torch.equal(same[k], other[k]) == k.endswith("lora_B.weight") for k in same)
    assert not any(v.any() for k, v in same.items() if k.endswith("lora_B.weight"))
