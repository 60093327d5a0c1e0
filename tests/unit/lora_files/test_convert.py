"""Scales, fused layers, families and sums of LoRA files, against arithmetic written out here."""

import json

import pytest
import torch

from sfgrpo.lora_files.convert import convert, factors, factors_named, warnings
from sfgrpo.lora_files.doctor import report
from sfgrpo.lora_files.file import LoRAFile
from sfgrpo.lora_files.merge import cut_rank, merge
from sfgrpo.lora_files.metadata import model_of
from sfgrpo.lora_files.understand import understand

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
    "kohya's metadata": ({"metadata": {"ss_network_alpha": "8.0", "ss_network_dim": "4"}}, 1.0),
    "plain metadata": ({"metadata": {"lora_alpha": "2", "rank": "4"}}, 1.0),
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


DOUBTS = {
    "kohya": ({"ss_network_alpha": "1.0", "ss_network_dim": "4"}, "an alpha of 1 (ss_network_alpha)"),
    "plain": ({"lora_alpha": "2", "rank": "4"}, "an alpha of 2 (lora_alpha)"),
    "plain, no rank": ({"alpha": "2"}, "an alpha of 2 (alpha)"),
    "alpha is the rank": ({"ss_network_alpha": "4", "ss_network_dim": "4"}, ""),
    "another rank": ({"ss_network_alpha": "8.0", "ss_network_dim": "16"}, ""),
    "no number": ({"ss_network_alpha": "None", "ss_network_dim": "4"}, ""),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_an_alpha_that_only_metadata_tell(name):
    """No loader reads it, and kohya's converters leave it where it is folded: both readings are told."""
    metadata, words = DOUBTS[name]
    file = lora(metadata=metadata)
    text = report(file).text()
    assert (words in text) if words else ("its metadata tell an alpha" not in text)
    assert "ComfyUI at strength 1.0: 1 of 1 layers are loaded, at its true strength" in text
    _, b = pair()
    for alpha in (1.0, 8.0):
        state, metadata = convert(file, alpha=alpha)
        torch.testing.assert_close(state[f"{KEY}.lora_B.weight"], alpha / 4 * b)
        assert metadata["alpha"] == "folded into lora_B"
        assert f"at {4 / alpha:.3g} times its true strength" in report(file, alpha=alpha).text()


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_none(alpha):
    with pytest.raises(ValueError, match="alpha must be above 0 and finite"):
        convert(lora(), alpha=alpha)


def test_a_given_alpha_comes_before_what_a_file_says():
    _, b = pair()
    for file in (lora(alpha=6.0), lora(config={"lora_alpha": 64}), lora(metadata=diffusers(lora_alpha=8))):
        state, _ = convert(file, alpha=2.0)
        torch.testing.assert_close(state[f"{KEY}.lora_B.weight"], 0.5 * b)


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


OTHERS = {
    "HunyuanVideo, musubi": (
        [f"lora_unet_double_blocks_{i}_img_attn_qkv" for i in range(20)],
        {"ss_base_model_version": "hunyuan_video", "modelspec.architecture": "hunyuan-video/lora"},
        3072,
        9216,
        "its metadata name HunyuanVideo (ss_base_model_version = hunyuan_video)",
    ),
    "HunyuanVideo without metadata": (
        [f"lora_unet_single_blocks_{i}_linear1" for i in range(40)],
        {},
        3072,
        21504,
        "no published FLUX.1 has 40 single_transformer_blocks",
    ),
    "HunyuanVideo's feed-forward": (
        [f"lora_unet_double_blocks_0_{n}" for n in ("img_attn_qkv", "img_attn_proj", "txt_attn_qkv", "img_mlp_fc1")],
        {},
        6,
        18,
        "it has layers of HunyuanVideo",
    ),
    "FramePack": (
        ["lora_unet_single_blocks_0_linear1"],
        {"ss_base_model_version": "framepack"},
        3072,
        21504,
        "its metadata name FramePack",
    ),
    "HunyuanImage": (
        ["lora_unet_double_blocks_0_img_attn_q", "lora_unet_double_blocks_0_img_attn_proj"],
        {},
        3584,
        3584,
        "it has layers of HunyuanImage",
    ),
    "LTX-Video": (
        [f"transformer.transformer_blocks.0.{n}" for n in ("attn1.to_q", "attn2.to_q", "attn2.to_k", "ff.net.2")],
        {},
        2048,
        2048,
        "it has layers of LTX-Video",
    ),
    "Sana": (
        [f"transformer.transformer_blocks.{i}.attn2.to_q" for i in range(4)],
        {},
        2240,
        2240,
        "only second attentions",
    ),
    "AuraFlow": (
        [f"transformer.{s}.0.attn.to_q" for s in ("single_transformer_blocks", "joint_transformer_blocks")],
        {},
        3072,
        3072,
        "it has layers of AuraFlow",
    ),
    "LongCat": (
        ["transformer.transformer_blocks.0.attn.to_q"],
        {"modelspec.architecture": "longcat_image/lora"},
        3072,
        3072,
        "its metadata name LongCat",
    ),
    "OmniGen2": (["transformer.layers.0.attn.to_q"], {}, 2520, 2520, "has the width 2520"),
    "unknown layers": (
        [f"transformer.transformer_blocks.0.{n}" for n in ("attn.to_q", "attn.to_k", "odd", "strange")],
        {},
        8,
        8,
        "2 of its 4 layers are none of",
    ),
    "two of ours": (
        ["diffusion_model.blocks.0.self_attn.q"],
        {"modelspec.architecture": "flux-1-dev/lora"},
        8,
        8,
        "its metadata name FLUX.1 (modelspec.architecture = flux-1-dev/lora), but its layers are those of Wan",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_models_are_not_taken_for_ours(name):
    """Names, sizes and metadata as the other models' trainers write them."""
    layers, metadata, inside, outside, words = OTHERS[name]
    file = LoRAFile("file", {}, metadata)
    for layer in layers:
        file.tensors |= lora(layer, rank=1, inside=inside, outside=outside).tensors
    found = report(file)
    assert words in found.doubt and not found.healthy
    assert words in found.text() and "to do: nothing" not in found.text()
    for write in (convert, lambda x: merge([x], [1.0])):
        with pytest.raises(ValueError, match="may be of another model: .*if you know that it is of"):
            write(file)


def test_a_model_that_is_given_ends_the_doubt():
    key = "transformer.transformer_blocks.0.attn.to_q"
    file = lora(key, metadata={"modelspec.architecture": "longcat_image/lora"})
    state, metadata = convert(file, model="flux1")
    assert metadata["base_model_family"] == "flux1" and f"{key}.lora_A.weight" in state
    with pytest.raises(ValueError, match="unknown model 'flux'; choose one of sd3, flux1"):
        convert(file, model="flux")
    with pytest.raises(ValueError, match="has no layer of Wan"):
        convert(file, model="wan")


@pytest.mark.parametrize(
    "metadata", [{"software": "stepwise-grpo 0.1.0"}, {"ss_base_model_version": "sd3"}, {"base_model_family": "sd3"}]
)
def test_a_model_of_a_size_of_its_own(metadata):
    """Who trained one says which family it is of."""
    file = lora("transformer.transformer_blocks.0.attn2.to_q", inside=1152, outside=1152, metadata=metadata)
    file.tensors |= lora(KEY, inside=1152, outside=1152).tensors
    assert len(convert(file)[0]) == 4
    file.metadata = {}
    with pytest.raises(ValueError, match="no published Stable Diffusion 3 / 3.5 has the width 1152"):
        convert(file)


def test_layers_that_only_one_wan_has_are_named():
    """Those of the image inputs of 2.1: ComfyUI logs them as not loaded for all others."""
    file = lora("diffusion_model.blocks.0.cross_attn.k_img")
    file.tensors |= lora("diffusion_model.blocks.0.cross_attn.v_img", seed=1).tensors
    text = report(file).text()
    assert "2 layers are those of Wan 2.1's image inputs" in text and text.endswith("to do: nothing")
    assert "image inputs" not in report(lora("diffusion_model.blocks.0.cross_attn.k")).text()


def test_the_second_transformer_is_left_out_and_named():
    file = lora("transformer.blocks.0.attn1.to_q")
    file.tensors |= lora("transformer_2.blocks.0.attn1.to_q", seed=1).tensors
    state, _ = convert(file)
    assert torch.equal(state["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], pair()[0]) and len(state) == 2
    assert "the second transformer (of low noise)" in report(file).text()
    alone = lora("transformer_2.blocks.0.attn1.to_q", seed=1)
    assert torch.equal(convert(alone)[0]["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], pair(seed=1)[0])


NAMED = {
    "sd3": ["sd_3", "sd3-medium", "5-medium", "5-large", "medium", "stable-diffusion-3-5-medium/lora"],
    "flux1": ["flux1", "flux.1", "flux.1_kontext", "flux_kontext", "flux-1-dev/lora", "Flux.1-fill-dev"],
    "flux2": ["flux_2_dev", "flux_2_klein_4b", "flux2", "flux2_klein_9b", "Flux.2-dev/lora", "Flux.2-klein-4b"],
    "qwen_image": ["qwen_image", "qwen_image_edit", "Qwen-Image-Edit-2511/lora", "qwen_image-v1.0/lora"],
    "z_image": ["z_image", "zimage", "Z-Image/lora", "z-image-turbo/lora"],
    "wan": ["wan", "wan_2.1", "wan_2.2_5b", "wan2.1/lora", "wan-t2v-480p-1.3b-2.1/lora"],
    "chroma": ["chroma", "Chroma1", "chroma-base/lora"],
    "lumina2": ["lumina2", "lumina-2", "lumina"],
    "": ["sdxl_base_v1-0", "sd_v1", "sd_1.5", "stable-diffusion-v1/lora", "stable-diffusion-xl-v1-base/lora", "ltx2",
         "hunyuan_video_1_5", "hunyuan-image-2.1", "framepack", "hidream_i1", "anima-preview", "chroma_radiance",
         "zeta_chroma", "krea2", "Kandinsky-5/lora", "omnigen2", "pixart-sigma", "auraflow", "sd_v2", "cogvideox"],
}  # fmt: skip


@pytest.mark.parametrize("key", ["ss_base_model_version", "modelspec.architecture"])
@pytest.mark.parametrize("family", NAMED)
def test_what_trainers_call_the_models(family, key):
    for value in NAMED[family]:
        named = model_of({key: value})
        assert named.families == ({family} if family else set()), value
        assert bool(named.other) == (not family), value


def test_the_address_of_a_models_code():
    """As kohya's trainers write it beside, or without, the name; diffusers' own says nothing."""
    site = "https://github.com/"
    for address, family, other in (
        ("Tencent/HunyuanVideo", "", "HunyuanVideo"),
        ("black-forest-labs/flux", "flux1", ""),
        ("black-forest-labs/flux2", "flux2", ""),
        ("Tongyi-MAI/Z-Image", "z_image", ""),
        ("Wan-Video/Wan2.1", "wan", ""),
        ("huggingface/diffusers", "", ""),
        ("Stability-AI/generative-models", "", ""),
    ):
        named = model_of({"modelspec.implementation": site + address})
        assert named.families == ({family} if family else set()) and named.other == other, address


def test_free_text_names_no_other_model():
    """A folder may be called anything."""
    assert not model_of({"base_model": "anima-and-sana"}).other
    assert model_of({"base_model": "stabilityai/stable-diffusion-3.5-medium"}).families == {"sd3"}
    assert model_of({"base_model": "Wan-AI/Wan2.2-TI2V-5B-Diffusers"}).families == {"wan"}
    assert not model_of({"base_model": "taiwan/hunyuan"}).families


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_"])
def test_a_fused_layer_and_its_parts_are_added(prefix):
    """As ComfyUI does: the factors are stacked, so that the sum is exact and the ranks add."""
    a, b = pair(4, outside=24)
    name = "double_blocks.0.img_attn.qkv"
    fused = prefix + (name if prefix.endswith(".") else name.replace(".", "_"))
    state = {f"{fused}.lora_down.weight": a, f"{fused}.lora_up.weight": b, f"{fused}.alpha": torch.tensor(2.0)}
    more = lora(KEY, rank=3, seed=5)
    found = factors(LoRAFile("file", state | more.tensors))
    for i, part in enumerate(("to_q", "to_k", "to_v")):
        a_sum, b_sum = found[f"transformer.transformer_blocks.0.attn.{part}"]
        wanted = 0.5 * b[8 * i : 8 * i + 8] @ a
        if part == "to_q":
            a_more, b_more = pair(3, seed=5)
            wanted = wanted + b_more @ a_more
        assert len(a_sum) == (7 if part == "to_q" else 4)
        torch.testing.assert_close(b_sum @ a_sum, wanted)


def test_the_same_layer_in_two_spellings_is_refused():
    """ComfyUI would load one of them."""
    file = lora(KEY)
    file.tensors |= lora(KEY.removeprefix("transformer.")).tensors
    with pytest.raises(ValueError, match=r"to_q twice, in two dialects"):
        convert(file)


def test_names_that_lost_dots():
    """A converter of musubi-tuner's joins some parts of FLUX.2's names; no loader knows them, a conversion does."""
    file = lora("diffusion_model.double_blocks.0.img_attn_proj")
    found = report(file)
    assert "ComfyUI at strength 1.0: nothing is loaded" in found.text()
    assert list(convert(file)[0]) == [f"transformer.transformer_blocks.0.attn.to_out.0.lora_{x}.weight" for x in "AB"]


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
