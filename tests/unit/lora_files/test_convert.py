"""Scales, fused layers, families and sums of LoRA files, against arithmetic written out here."""

import json

import pytest
import torch

from sfgrpo.lora_files.convert import convert, factors, factors_named, understand, warnings
from sfgrpo.lora_files.doctor import report
from sfgrpo.lora_files.file import LoRAFile
from sfgrpo.lora_files.merge import cut_rank, merge

LAYER = "transformer_blocks.0.attn.to_q"
KEY = f"transformer.{LAYER}"


def pair(rank: int = 4, inside: int = 8, outside: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, inside, generator=generator), torch.randn(outside, rank, generator=generator)


def lora(name: str = KEY, *, prefix: str = "lora", metadata=None, config=None, alpha=None, **size) -> LoRAFile:
    a, b = pair(**size)
    state = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    if alpha is not None:
        state[f"{name}.alpha"] = torch.tensor(alpha)
    return LoRAFile("file", state, metadata or {}, config or {})


def diffusers(**config) -> dict:
    return {"lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in config.items()})}


SCALES = {
    "nowhere": ({}, 1.0),
    "folded": ({"metadata": {"alpha": "folded into lora_B", "rank": "4"}}, 1.0),
    "tensor": ({"alpha": 6.0}, 1.5),
    "tensor before metadata": ({"alpha": 6.0, "metadata": {"ss_network_alpha": "8"}}, 1.5),
    "zero tensor": ({"alpha": 0.0}, 0.0),
    "kohya": ({"metadata": {"ss_network_alpha": "8.0", "ss_network_dim": "4"}}, 2.0),
    "kohya of another rank": ({"metadata": {"ss_network_alpha": "8.0", "ss_network_dim": "16"}}, 1.0),
    "kohya without": ({"metadata": {"ss_network_alpha": "None", "ss_network_dim": "4"}}, 1.0),
    "plain": ({"metadata": {"lora_alpha": "2", "rank": "4"}}, 0.5),
    "plain, no rank": ({"metadata": {"alpha": "2"}}, 0.5),
    "diffusers": ({"metadata": diffusers(r=4, lora_alpha=8)}, 2.0),
    "diffusers, rslora": ({"metadata": diffusers(r=4, lora_alpha=8, use_rslora=True)}, 4.0),
    "diffusers, pattern": ({"metadata": diffusers(r=4, lora_alpha=8, alpha_pattern={"attn.to_q": 12})}, 3.0),
    "diffusers, other pattern": ({"metadata": diffusers(r=4, lora_alpha=8, alpha_pattern={"to_k": 12})}, 2.0),
    "peft": ({"config": {"r": 4, "lora_alpha": 64}}, 16.0),
    "peft, rslora": ({"config": {"r": 4, "lora_alpha": 64, "use_rslora": True}}, 32.0),
    "diffusers before peft": ({"metadata": diffusers(lora_alpha=8), "config": {"lora_alpha": 64}}, 2.0),
}


@pytest.mark.parametrize("name", SCALES)
def test_scale(name):
    given, scale = SCALES[name]
    a, b = pair()
    (found,) = factors(lora(**given)).values()
    assert torch.equal(found[0], a)
    torch.testing.assert_close(found[1], scale * b, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": {"lora_alpha": 8, "use_dora": True}}, "is a DoRA"),
        ({"config": {"lora_alpha": "many"}}, "alpha of its peft configuration is no number"),
        ({"config": {}, "metadata": {"lora_adapter_metadata": "["}}, "no JSON table"),
        ({"config": {"lora_alpha": 8, "alpha_pattern": {"(": 4}}}, "is no pattern"),
    ],
)
def test_a_configuration_that_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        factors(lora(**given))


@pytest.mark.parametrize("name", ["double_blocks.0.img_attn.qkv", "joint_blocks.0.x_block.attn.qkv"])
def test_a_fused_layer_is_cut(name):
    a, b = pair(outside=24)
    found = factors(lora(f"diffusion_model.{name}", outside=24))
    for i, part in enumerate(("to_q", "to_k", "to_v")):
        one = found[f"transformer.transformer_blocks.0.attn.{part}"]
        assert torch.equal(one[0], a) and torch.equal(one[1], b[8 * i : 8 * i + 8])
    assert len(found) == 3


def test_a_fused_layer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="24 rows of single_blocks.* do not divide into q, k and v of width 8"):
        factors(lora("diffusion_model.single_blocks.0.linear1", outside=24))


def test_lumina2_is_fused_again():
    """Different A of q, k and v are stacked: the product is exact, with three times the rank."""
    state, whole = {}, []
    for seed, (part, rows) in enumerate((("to_q", 6), ("to_k", 2), ("to_v", 2))):
        a, b = pair(2, 6, rows, seed)
        state |= {
            f"transformer.layers.0.attn.{part}.lora_A.weight": a,
            f"transformer.layers.0.attn.{part}.lora_B.weight": b,
        }
        whole.append(b @ a)
    found = factors(LoRAFile("file", state))
    (a, b) = found.pop("diffusion_model.layers.0.attention.qkv")
    assert not found and len(a) == 6
    torch.testing.assert_close(b @ a, torch.cat(whole))
    back = factors(LoRAFile("file", {"diffusion_model.layers.0.attention.qkv.lora_A.weight": a,
                                     "diffusion_model.layers.0.attention.qkv.lora_B.weight": b}))  # fmt: skip
    assert torch.equal(back["diffusion_model.layers.0.attention.qkv"][0], a)


FAMILIES = {
    "sd3": ("transformer.transformer_blocks.23.attn.to_q", 1536, 1536, "Stable Diffusion 3"),
    "sd3 large": ("transformer.transformer_blocks.37.attn.to_q", 2432, 2432, "Stable Diffusion 3"),
    "flux1": ("transformer.transformer_blocks.18.attn.to_q", 3072, 3072, "FLUX.1"),
    "flux2": ("transformer.transformer_blocks.7.attn.to_q", 6144, 6144, "FLUX.2"),
    "flux1, single": ("lora_unet_single_blocks_3_linear1", 8, 56, "FLUX.1"),
    "flux2, single": ("lora_unet_single_blocks_3_linear1", 8, 72, "FLUX.2"),
    "qwen": ("transformer.transformer_blocks.59.attn.to_q", 3072, 3072, "Qwen-Image"),
    "z_image": ("diffusion_model.layers.3.attention.qkv", 6, 18, "Z-Image"),
    "lumina2": ("diffusion_model.layers.3.attention.qkv", 6, 10, "Lumina"),
    "wan": ("diffusion_model.blocks.3.self_attn.q", 8, 8, "Wan"),
    "wan of diffusers": ("transformer.blocks.3.attn1.to_q", 8, 8, "Wan"),
    "chroma": ("transformer.distilled_guidance_layer.layers.0.linear_1", 8, 8, "Chroma"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    key, inside, outside, title = FAMILIES[name]
    assert report(lora(key, rank=1, inside=inside, outside=outside)).family.startswith(title)


@pytest.mark.parametrize(
    ("hint", "title"),
    [
        ({"ss_base_model_version": "flux2_klein"}, "FLUX.2"),
        ({"modelspec.architecture": "flux-1-dev/lora"}, "FLUX.1"),
        ({"modelspec.architecture": "stable-diffusion-3-medium/lora"}, "Stable Diffusion 3"),
        ({"base_model": "Qwen/Qwen-Image"}, "Qwen-Image"),
    ],
)
def test_metadata_decide_where_names_do_not(hint, title):
    found = report(lora(metadata=hint))
    assert found.family.startswith(title) and not found.also


def test_layers_of_no_known_model():
    file = lora("diffusion_model.blocks.0.strange")
    with pytest.raises(ValueError, match="layers of no model that is known here .*strange"):
        understand(file)
    # A model that has just these layers can go on from them.
    assert list(factors_named(file, ["diffusion_model.blocks.0.strange"])) == ["diffusion_model.blocks.0.strange"]


def test_what_is_left_out_is_named():
    file = lora("transformer.transformer_blocks.0.ff.linear_in", outside=48)
    a, b = pair()
    for name in ("transformer.single_stream_modulation.linear", "lora_te1_x", "transformer.transformer_blocks.0.odd"):
        file.tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    file.tensors["transformer.transformer_blocks.0.ff.linear_in.diff_b"] = torch.ones(48)
    state, metadata = convert(file)
    assert {k.rsplit(".lora_", 1)[0] for k in state} == {"transformer.transformer_blocks.0.ff.linear_in"}
    text = "\n".join(warnings(understand(file)))
    for name in ("single_stream_modulation", "lora_te1_x", "blocks.0.odd", "diff_b"):
        assert name in text
    assert metadata["alpha"] == "folded into lora_B" and metadata["rank"] == "4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_of_a_conversion(dtype):
    a, b = pair()
    file = lora(alpha=6.0)
    for state, _ in (convert(file, dtype), convert(LoRAFile("x", {k: v.to(dtype) for k, v in file.tensors.items()}))):
        assert {v.dtype for v in state.values()} == {dtype}
        got = state[f"{KEY}.lora_B.weight"].float() @ state[f"{KEY}.lora_A.weight"].float()
        torch.testing.assert_close(got, 1.5 * b @ a, rtol=0.05, atol=0.1)


def test_a_number_without_room_is_refused():
    file = lora(alpha=4e6)
    with pytest.raises(ValueError, match="too large for torch.float16; choose bf16 or fp32"):
        convert(file, torch.float16)


def test_a_merge_is_the_sum():
    """Dialects, ranks, scales and layers differ."""
    a1, b1 = pair(4)
    a2, b2 = pair(2, outside=24, seed=1)
    one = lora(alpha=6.0)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    two = LoRAFile(
        "two", {f"{key}.lora_down.weight": a2, f"{key}.lora_up.weight": b2, f"{key}.alpha": torch.tensor(1.0)}
    )
    state, metadata = merge([one, two], [0.5, -2.0])
    meant = {part: -2 * 0.5 * (b2[8 * i : 8 * i + 8] @ a2) for i, part in enumerate(("to_q", "to_k", "to_v"))}
    meant["to_q"] = meant["to_q"] + 0.5 * 1.5 * (b1 @ a1)
    for part, value in meant.items():
        name = f"transformer.transformer_blocks.0.attn.{part}"
        torch.testing.assert_close(state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"], value)
    assert len(state) == 6 and metadata["rank"] == "2-6"
    again = merge([LoRAFile("sum", state, metadata)], [1.0])[0]
    assert all(torch.equal(again[k], v) for k, v in state.items())


def test_cut_rank_is_the_nearest():
    a, b = pair(6, 12, 10)
    u, s, v = torch.linalg.svd((b @ a).double())
    for rank in (1, 3, 5):
        cut_a, cut_b = cut_rank(a, b, rank)
        assert cut_a.shape == (rank, 12) and cut_b.shape == (10, rank)
        best = (u[:, :rank] * s[:rank] @ v[:rank]).float()
        torch.testing.assert_close(cut_b @ cut_a, best, rtol=0, atol=1e-5)
    assert torch.equal(cut_rank(a, b, 6)[0], a)
    with pytest.raises(ValueError, match="rank must be 1 or more"):
        cut_rank(a, b, 0)


def test_merges_that_are_refused():
    with pytest.raises(ValueError, match=r"different models cannot be merged: .* Wan .* FLUX.1|different models"):
        merge(
            [lora("diffusion_model.blocks.0.self_attn.q"), lora("lora_unet_single_blocks_0_linear1", outside=56)],
            [1, 1],
        )
    with pytest.raises(ValueError, match="another width"):
        merge([lora(), lora(inside=16, outside=16)], [1, 1])


def test_the_report_in_words():
    text = report(lora(config={"r": 4, "lora_alpha": 8})).text()
    assert "ComfyUI at strength 1.0: 1 of 1 layers are loaded, at 0.5 times its true strength" in text
    assert "lora_alpha in adapter_config.json beside the file; its trainer meant B A times 2" in text
    assert text.endswith("to do: convert it; the result loads in both at 1.0")
    state, metadata = convert(lora(config={"r": 4, "lora_alpha": 8}))
    assert report(LoRAFile("new", state, metadata)).text().endswith("to do: nothing")
