"""LoRA files of every dialect against ComfyUI's own loader, diffusers' own, and peft.

Small models with weights of zero, so that what a loader leaves in a weight is the LoRA's effect. The effect that a file
was made with is known. Native layers are compared with diffusers' through diffusers' own converters of checkpoints.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sfgrpo.export import save_lora
from sfgrpo.lora_files.convert import convert
from sfgrpo.lora_files.diffusers_loader import in_diffusers
from sfgrpo.lora_files.families import FAMILIES
from sfgrpo.lora_files.file import read_lora
from sfgrpo.lora_files.loaders import in_comfyui
from sfgrpo.lora_files.merge import merge
from sfgrpo.lora_files.understand import understand
from tests.lora_dialects import ALPHA, DIALECTS, RANK, Dialect, write
from tests.lora_extras import EXTRAS
from tests.lora_models import (
    SMALL,
    Comfy,
    diffusers_linears,
    in_diffusers_names,
    loaded_in_diffusers,
    make_pipeline,
    make_transformer,
)

COMMON = ("diffusers with metadata", "peft", "kohya")
"""Dialects of the quick tests; the slow ones take all."""

NOT_IN_COMFYUI = ("time_guidance_embed.", "double_stream_modulation", "single_stream_modulation", "distilled_guidance")
"""Layers that ComfyUI cannot load by diffusers' names."""

EACH = [
    pytest.param(key, name, marks=[] if name in COMMON else pytest.mark.slow, id=f"{key}, {name}")
    for key in SMALL
    for name in DIALECTS
]


@pytest.fixture(scope="module")
def comfy(tmp_path_factory):
    process = Comfy(tmp_path_factory.mktemp("comfy"))
    yield process
    process.close()


class Case:
    """One file, and what it does to each weight of diffusers' model."""

    def __init__(self, comfy: Comfy, key: str, name: str, folder) -> None:
        self.comfy, self.key, self.dialect = comfy, key, DIALECTS[name]
        linears = comfy.linears[key] if self.dialect.native else diffusers_linears(key)
        # The small Z-Image has time embeddings of different sizes in the two.
        linears = {n: size for n, size in linears.items() if not (key == "z_image" and n.startswith("t_embedder"))}
        state, self.written = write(self.dialect, linears)
        self.path = folder / "file.safetensors"
        save_file(state, self.path, self.dialect.metadata)
        self.weights, self.lines = comfy.load(key, self.path)
        self.meant = self.named(self.written) if self.dialect.native else self.written

    def named(self, native: dict) -> dict:
        """Native changes of weights in diffusers' names."""
        zeros = {n: torch.zeros_like(v) for n, v in self.weights.items()}
        found = in_diffusers_names(self.key, zeros | {f"{n}.weight": v for n, v in native.items()})
        return {n: v for n, v in found.items() if v.any()}


@pytest.fixture(scope="module")
def case(comfy, tmp_path_factory):
    """`case(family, dialect)`."""
    made = {}

    def make(key: str, name: str) -> Case:
        if (key, name) not in made:
            made.clear()  # weights of one file at a time
            made[key, name] = Case(comfy, key, name, tmp_path_factory.mktemp("case"))
        return made[key, name]

    return make


def assert_same(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize(("key", "name"), EACH)
def test_a_converted_file_loads_in_both_at_its_true_strength(case, comfy, key, name, tmp_path):
    made = case(key, name)
    state, metadata = convert(read_lora(made.path))
    assert not [k for k in state if "alpha" in k]
    save_lora(state, tmp_path / "new.safetensors", metadata)
    wanted = {n: v for n, v in made.meant.items() if not n.startswith(NOT_IN_COMFYUI)}
    weights, lines = comfy.load(key, tmp_path / "new.safetensors")
    assert lines == []
    assert_same(made.named({n.removesuffix(".weight"): v for n, v in weights.items() if v.any()}), wanted)
    assert_same(loaded_in_diffusers(key, tmp_path / "new.safetensors"), wanted)
    again, _ = convert(read_lora(tmp_path / "new.safetensors"))
    assert again.keys() == state.keys() and all(torch.equal(again[k], v) for k, v in state.items())


@pytest.mark.parametrize(("key", "name"), EACH)
def test_the_report_says_what_both_do_with_a_file(case, key, name):
    made = case(key, name)
    read = understand(read_lora(made.path))
    assert read.family.key == key
    verdict = in_comfyui(read)
    unloaded = {line.removeprefix("lora key not loaded: ") for line in made.lines}
    assert unloaded == {k for layer, _ in read.layers if layer.key in verdict.fails for k in layer.keys}
    ratios = dict(zip(verdict.loads, verdict.ratios, strict=True))
    if made.dialect.native:
        for layer, place in read.layers:
            if layer.key in ratios:
                native = place.name(place.entries[0].native)
                wanted = ratios[layer.key] * made.written[native]
                torch.testing.assert_close(made.weights[f"{native}.weight"], wanted, rtol=1e-4, atol=1e-3)
    verdict = in_diffusers(read)
    if key in ("flux1", "chroma") and made.dialect.native and made.dialect.down == ".lora_down.weight":
        return  # diffusers has the width of the large model in this conversion
    try:
        got = loaded_in_diffusers(key, made.path)
    except Exception as error:
        got = {}
        assert not verdict.loads, error
    ratios = dict(zip(verdict.loads, verdict.ratios, strict=True))
    names = {p.name(e.diffusers): ratios[la.key] for la, p in read.layers if la.key in ratios for e in p.entries}
    for layer, place in read.layers:
        if "wrong order" in verdict.fails.get(layer.key, ""):
            wrong = got.pop(place.name(place.entries[0].diffusers))
            assert not torch.allclose(wrong, made.meant[place.name(place.entries[0].diffusers)])
    assert got.keys() == names.keys()
    for layer, ratio in names.items():
        torch.testing.assert_close(got[layer], ratio * made.meant[layer], rtol=1e-4, atol=1e-3)


def loaded(key: str, path) -> dict:
    """What diffusers loads; nothing where it refuses the file."""
    try:
        return loaded_in_diffusers(key, path)
    except (ValueError, TypeError, KeyError, IndexError, AssertionError, NotImplementedError, AttributeError):
        return {}


def sweep_linears(comfy, key: str, dialect) -> dict[str, tuple[int, int]]:
    linears = comfy.linears[key] if dialect.native else diffusers_linears(key)
    # The small Z-Image has time embeddings of different sizes in the two; diffusers has the width of the large FLUX.1
    # in its conversion of linear1.
    left = {"z_image": "t_embedder.", "flux1": "linear1", "chroma": "linear1"}.get(key, "no such layer")
    return {n: size for n, size in linears.items() if left not in f"{n}."}


ONLY = {
    "whole": lambda linears: linears,
    "attention": lambda linears: {n: s for n, s in linears.items() if "attn" in n or "attention" in n},
    "blocks": lambda linears: {n: s for n, s in linears.items() if "block" in n and "_img" not in n},
}
"""Which layers a file has: some conversions of diffusers take no others."""


@pytest.mark.parametrize(("key", "name"), EACH)
def test_verdicts_hold_for_a_file_whole(comfy, key, name, tmp_path):
    """One key more may turn diffusers to another conversion, or make it refuse the file; ComfyUI passes it over."""
    dialect = DIALECTS[name]
    linears = sweep_linears(comfy, key, dialect)
    some = ["whole", *(["blocks"] if key == "wan" else [])]
    some += ["attention"] if name == "onetrainer" or key == "chroma" else []
    for layers in some:
        base, meant = write(dialect, ONLY[layers](linears))
        for what, extra in {"nothing": lambda *_: {}, **EXTRAS}.items():
            path = tmp_path / "x.safetensors"
            save_file(base | extra(dialect, linears), path, dialect.metadata)
            read = understand(read_lora(path), model=key)
            verdict = in_diffusers(read)
            ratios = dict(zip(verdict.loads, verdict.ratios, strict=True))
            said = {p.name(e.diffusers): ratios[la.key] for la, p in read.layers if la.key in ratios for e in p.entries}
            wrong = [p for la, p in read.layers if "wrong order" in verdict.fails.get(la.key, "")]
            got = loaded(key, path)
            got = {n: v for n, v in got.items() if n not in {p.name(p.entries[0].diffusers) for p in wrong}}
            assert got.keys() == said.keys(), (layers, what)
            if not dialect.native:
                for layer, ratio in said.items():
                    torch.testing.assert_close(got[layer], ratio * meant[layer], rtol=1e-4, atol=1e-3, msg=what)


def odd_files(comfy):
    """Files that only differ a little from common ones; name -> (family, tensors, metadata)."""
    flux = sweep_linears(comfy, "flux1", DIALECTS["diffusers"])
    attention = ONLY["attention"](flux)
    outside = {n: size for n, size in flux.items() if "blocks." not in n}
    table = {"transformer.r": RANK, "transformer.lora_alpha": ALPHA, "transformer.target_modules": ["to_q"]}
    wan = {n: size for n, size in comfy.linears["wan"].items() if n.startswith("blocks.") and "v_img" not in n}
    alphas = write(DIALECTS["diffusers with alphas"], attention)[0]
    first = next(key for key in alphas if key.endswith(".alpha"))
    other = next(key for key in reversed(alphas) if key.endswith(".alpha"))

    def said(**change) -> dict:
        return {"lora_adapter_metadata": json.dumps(table | {f"transformer.{k}": v for k, v in change.items()})}

    plain = write(DIALECTS["diffusers"], attention)[0]
    pattern = {n: RANK for n in attention}
    return {
        "one layer without alpha": ("flux1", {k: v for k, v in alphas.items() if k != first}, {}),
        "another alpha": ("flux1", alphas | {other: torch.tensor(3.0)}, {}),
        "another rank in the metadata": ("flux1", plain, said(r=2 * RANK)),
        "its rank in a pattern": ("flux1", plain, said(r=2 * RANK, rank_pattern=pattern)),
        "no rank in the metadata": (
            "flux1",
            plain,
            {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 4})},
        ),
        "OneTrainer outside the blocks": ("flux1", write(DIALECTS["onetrainer"], attention | outside)[0], {}),
        "a key of images without its value": ("wan", write(DIALECTS["native"], wan)[0], {}),
        "the same of kohya's": ("wan", write(DIALECTS["kohya"], wan)[0], {}),
    }


@pytest.mark.parametrize("name", ["one layer without alpha", "another alpha", "another rank in the metadata",
    "its rank in a pattern", "no rank in the metadata", "OneTrainer outside the blocks",
    "a key of images without its value", "the same of kohya's"])  # fmt: skip
def test_verdicts_on_odd_files(comfy, name, tmp_path):
    key, state, metadata = odd_files(comfy)[name]
    save_file(state, tmp_path / "x.safetensors", metadata)
    read = understand(read_lora(tmp_path / "x.safetensors"), model=key)
    verdict = in_diffusers(read)
    effect = {n: read.factors[f"transformer.{n}"] for n in diffusers_linears(key) if f"transformer.{n}" in read.factors}
    ratios = dict(zip(verdict.loads, verdict.ratios, strict=True))
    said = {p.name(p.entries[0].diffusers): ratios[la.key] for la, p in read.layers if la.key in ratios}
    try:
        got = loaded_in_diffusers(key, tmp_path / "x.safetensors")
    except Exception:
        got = {}
    assert got.keys() == said.keys()
    for layer, ratio in said.items():
        a, b = effect[layer]
        torch.testing.assert_close(got[layer], ratio * b @ a, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("key", SMALL)
def test_what_else_is_in_a_file_does_not_disturb_comfyui(comfy, key, tmp_path):
    dialect = DIALECTS["native"]
    linears = sweep_linears(comfy, key, dialect)
    base, _ = write(dialect, linears)
    save_file(base, tmp_path / "base.safetensors")
    wanted, _ = comfy.load(key, tmp_path / "base.safetensors")
    for what, extra in EXTRAS.items():
        save_file(base | extra(dialect, linears), tmp_path / "x.safetensors")
        verdict = in_comfyui(understand(read_lora(tmp_path / "x.safetensors")))
        assert len(verdict.loads) == len(linears) and not verdict.fails, what
        got, _ = comfy.load(key, tmp_path / "x.safetensors")
        assert all(torch.equal(got[f"{n}.weight"], wanted[f"{n}.weight"]) for n in linears), what


@pytest.mark.parametrize("key", ["sd3", "flux1", "flux2", "z_image", "chroma"])
def test_a_fused_layer_and_its_parts_are_added_as_comfyui_does(comfy, key, tmp_path):
    family = FAMILIES[key]
    entry = next(e for e in family.entries if e.rows == "q" and "{}" in e.native)
    fused, part = (name.replace("{}", "0") for name in (entry.native, entry.diffusers))
    inside, outside = comfy.linears[key][fused]
    one, meant = write(DIALECTS["native"], {fused: (inside, outside)})
    two, more = write(DIALECTS["diffusers"], {part: (inside, inside)}, seed=1)
    save_file(one | two, tmp_path / "both.safetensors")
    weights, lines = comfy.load(key, tmp_path / "both.safetensors")
    wanted = meant[fused].clone()
    wanted[:inside] += more[part]
    assert lines == []
    torch.testing.assert_close(weights[f"{fused}.weight"], wanted)
    state, metadata = convert(read_lora(tmp_path / "both.safetensors"))
    save_lora(state, tmp_path / "new.safetensors", metadata)
    weights, lines = comfy.load(key, tmp_path / "new.safetensors")
    assert lines == []
    torch.testing.assert_close(weights[f"{fused}.weight"], wanted)
    torch.testing.assert_close(loaded_in_diffusers(key, tmp_path / "new.safetensors")[part], wanted[:inside])


@pytest.mark.parametrize("uso", [False, True])
def test_xlabs_files(comfy, uso, tmp_path):
    """Their linear1 has no rows of the MLP. ComfyUI reads them where two keys say that they are USO's."""
    width = 128
    sizes = {f"double_blocks.0.processor.{x}_lora{i}": n * width for i in (1, 2) for x, n in (("qkv", 3), ("proj", 1))}
    sizes |= {"single_blocks.1.processor.qkv_lora": 3 * width}
    if uso:
        sizes |= {"single_blocks.37.processor.qkv_lora": 3 * width, "double_blocks.18.processor.qkv_lora2": 3 * width}
    state, meant = write(
        Dialect(True, "", ".down.weight", ".up.weight"), {name: (width, rows) for name, rows in sizes.items()}
    )
    proj, more = write(
        Dialect(True, "", ".down.weight", ".up.weight"), {"single_blocks.1.processor.proj_lora": (5 * width, width)}
    )
    save_file(state | proj, tmp_path / "x.safetensors")
    read = understand(read_lora(tmp_path / "x.safetensors"))
    assert read.family.key == "flux1" and set(in_diffusers(read).ratios) == {1.0} and not in_diffusers(read).fails
    assert len(in_comfyui(read).loads) == (8 if uso else 0)
    block, single = "transformer_blocks.0.attn", "single_transformer_blocks.1"
    rows = meant["single_blocks.1.processor.qkv_lora"].split(width)
    wanted = {f"{single}.attn.to_{x}": v for x, v in zip("qkv", rows, strict=True)}
    wanted |= {f"{single}.proj_out": more["single_blocks.1.processor.proj_lora"]}
    wanted |= {f"{block}.to_out.0": meant["double_blocks.0.processor.proj_lora1"]}
    wanted |= {f"{block}.to_add_out": meant["double_blocks.0.processor.proj_lora2"]}
    for i, names in ((1, ("to_q", "to_k", "to_v")), (2, ("add_q_proj", "add_k_proj", "add_v_proj"))):
        rows = meant[f"double_blocks.0.processor.qkv_lora{i}"].split(width)
        wanted |= {f"{block}.{name}": v for name, v in zip(names, rows, strict=True)}
    assert_same(loaded_in_diffusers("flux1", tmp_path / "x.safetensors"), wanted)
    new, metadata = convert(read_lora(tmp_path / "x.safetensors"), model="flux1")
    save_lora(new, tmp_path / "new.safetensors", metadata)
    assert_same(loaded_in_diffusers("flux1", tmp_path / "new.safetensors"), wanted)
    weights, _ = comfy.load("flux1", tmp_path / ("x.safetensors" if uso else "new.safetensors"))
    linear1 = weights["single_blocks.1.linear1.weight"]
    torch.testing.assert_close(linear1[: 3 * width], meant["single_blocks.1.processor.qkv_lora"])
    assert not linear1[3 * width :].any()


def test_control_loras_are_refused(tmp_path):
    """They widen a layer, which no A and B say."""
    state, _ = write(DIALECTS["native"], {"img_in": (128, 128)})
    for more in ({"diffusion_model.img_in.reshape_weight": torch.tensor([128, 128])},
                 {"single_blocks.0.norm.query_norm.scale": torch.ones(32)}):  # fmt: skip
        save_file(state | more, tmp_path / "x.safetensors")
        with pytest.raises(ValueError, match="is a control LoRA: it widens a layer"):
            read_lora(tmp_path / "x.safetensors")


@pytest.mark.parametrize("key", SMALL)
def test_a_file_whose_alpha_was_folded_keeps_its_strength(comfy, key, tmp_path):
    """As kohya's converters leave it: without alpha tensors, and with ss_network_alpha in the metadata."""
    dialect = DIALECTS["native"] if key == "wan" else DIALECTS["diffusers"]
    linears = {n: v for n, v in sweep_linears(comfy, key, dialect).items() if not n.startswith(NOT_IN_COMFYUI)}
    state, meant = write(dialect, linears)
    save_file(state, tmp_path / "x.safetensors", {"ss_network_alpha": "1.0", "ss_network_dim": str(RANK)})
    read = understand(read_lora(tmp_path / "x.safetensors"))
    assert "an alpha of 1 (ss_network_alpha)" in read.scale.doubt
    assert set(in_comfyui(read).ratios) | set(in_diffusers(read).ratios) == {1.0}
    new, metadata = convert(read_lora(tmp_path / "x.safetensors"))
    save_lora(new, tmp_path / "new.safetensors", metadata)
    for path in ("x.safetensors", "new.safetensors"):
        got = loaded_in_diffusers(key, tmp_path / path)
        if not dialect.native:
            assert_same(got, meant)
        weights, lines = comfy.load(key, tmp_path / path)
        effect = sum(float(weights[f"{n}.weight"].norm() ** 2) for n in comfy.linears[key])
        assert lines == [] and effect == pytest.approx(sum(float(v.norm() ** 2) for v in meant.values()), rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"attn.to_k": 3}}])
def test_a_folder_that_peft_saved(settings, tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=10, target_modules=["to_q", "to_k"], init_lora_weights=False, **settings)
    model = get_peft_model(make_transformer("sd3"), config)
    model.save_pretrained(tmp_path)
    layers = {n: m for n, m in model.base_model.model.named_modules() if hasattr(m, "lora_A")}
    read = understand(read_lora(tmp_path))
    assert_same(
        {n.removeprefix("transformer."): b @ a for n, (a, b) in read.factors.items()},
        {n: m.get_delta_weight("default").detach() for n, m in layers.items()},
    )


def test_a_file_that_diffusers_saved(comfy, tmp_path):
    """Its alpha stands in the metadata, which ComfyUI does not read."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = make_pipeline("sd3")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipeline.transformer.add_adapter(config)
    layers = {n: m for n, m in pipeline.transformer.named_modules() if hasattr(m, "lora_A")}
    meant = {n: m.get_delta_weight("default").detach() for n, m in layers.items()}
    pipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer),
        transformer_lora_adapter_metadata=config.to_dict(),
    )
    file = read_lora(tmp_path)
    assert json.loads(file.metadata["lora_adapter_metadata"])["transformer.lora_alpha"] == ALPHA
    read = understand(file)
    assert_same({n.removeprefix("transformer."): b @ a for n, (a, b) in read.factors.items()}, meant)
    assert set(in_comfyui(read).ratios) == {RANK / ALPHA} and set(in_diffusers(read).ratios) == {1.0}
    weights, _ = comfy.load("sd3", tmp_path / "pytorch_lora_weights.safetensors")
    rows = weights["joint_blocks.0.x_block.attn.qkv.weight"][:128]
    torch.testing.assert_close(rows, RANK / ALPHA * meant["transformer_blocks.0.attn.to_q"])


def test_a_merge_of_two_dialects_in_both(comfy, case, tmp_path):
    one = case("flux1", "kohya")
    state, other = write(DIALECTS["peft"], diffusers_linears("flux1"), seed=1)
    save_file(state, tmp_path / "other.safetensors")
    files = [read_lora(one.path), read_lora(tmp_path / "other.safetensors")]
    state, metadata = merge(files, [0.5, -1.5])
    save_lora(state, tmp_path / "sum.safetensors", metadata)
    wanted = {n: 0.5 * v - 1.5 * other[n] for n, v in one.meant.items()}
    weights, lines = comfy.load("flux1", tmp_path / "sum.safetensors")
    assert lines == []
    assert_same(one.named({n.removesuffix(".weight"): v for n, v in weights.items() if v.any()}), wanted)
    assert_same(loaded_in_diffusers("flux1", tmp_path / "sum.safetensors"), wanted)


def test_lumina2_in_native_names_as_diffusers_reads_them(tmp_path):
    """diffusers' loader has the widths 2304 and 768 in it and wants every layer of a block."""
    from diffusers import Lumina2Pipeline

    sizes = {
        "attention.qkv": (2304, 3840),
        "attention.out": (2304, 2304),
        "feed_forward.w1": (2304, 64),
        "feed_forward.w2": (64, 2304),
        "feed_forward.w3": (2304, 64),
        "adaLN_modulation.1": (64, 128),
    }
    state, _ = write(DIALECTS["native"], {f"layers.0.{n}": size for n, size in sizes.items()})
    save_file(state, tmp_path / "native.safetensors")
    theirs = Lumina2Pipeline.lora_state_dict(load_file(tmp_path / "native.safetensors"))
    names = {k.rsplit(".lora_", 1)[0] for k in theirs}
    meant = {n: theirs[f"{n}.lora_B.weight"] @ theirs[f"{n}.lora_A.weight"] for n in names}
    save_file({k: v.contiguous().clone() for k, v in theirs.items()}, tmp_path / "diffusers.safetensors")
    for name in ("native", "diffusers"):
        read = understand(read_lora(tmp_path / f"{name}.safetensors"))
        assert read.family.key == "lumina2" and set(in_diffusers(read).ratios) == {1.0}
        new, _ = convert(read_lora(tmp_path / f"{name}.safetensors"))
        assert new.keys() == state.keys()
        assert all(torch.equal(new[k], v) for k, v in state.items())
    assert len(meant) == 8
