"""Targets and fresh factors of the LoRA."""

import math

import pytest
import torch
from scipy import stats

from sfgrpo.lora import choose_targets, init_factors

NAMES = {
    # SD3, FLUX, FLUX.2, Qwen-Image, Z-Image, Wan (native): layer -> kind
    "transformer_blocks.0.attn.to_q": "attention",
    "transformer_blocks.0.attn.add_k_proj": "attention",
    "transformer_blocks.11.attn.to_out.0": "attention",
    "transformer_blocks.0.attn2.to_v": "attention",
    "transformer_blocks.0.attn.to_add_out": "attention",
    "transformer_blocks.0.ff.net.0.proj": "mlp",
    "transformer_blocks.0.ff_context.net.2": "mlp",
    "transformer_blocks.0.norm1.linear": "other",
    "single_transformer_blocks.3.attn.to_k": "attention",
    "single_transformer_blocks.3.proj_mlp": "mlp",
    "single_transformer_blocks.3.proj_out": "mlp",
    "single_transformer_blocks.3.norm.linear": "other",
    "single_transformer_blocks.3.attn.to_qkv_mlp_proj": "attention",
    "transformer_blocks.5.img_mlp.net.0.proj": "mlp",
    "transformer_blocks.5.txt_mlp.net.2": "mlp",
    "transformer_blocks.5.img_mod.1": "other",
    "layers.7.attention.to_q": "attention",
    "noise_refiner.1.attention.to_out.0": "attention",
    "layers.7.feed_forward.w3": "mlp",
    "layers.7.adaLN_modulation.0": "other",
    "blocks.2.self_attn.q": "attention",
    "blocks.2.cross_attn.o": "attention",
    "blocks.2.ffn.0": "mlp",
    "context_embedder": "other",
    "proj_out": "other",
    "norm_out.linear": "other",
    "time_text_embed.timestep_embedder.linear_1": "other",
}


@pytest.mark.parametrize("choice", ["attention", "attention_mlp", "all"])
@pytest.mark.parametrize("prefix", ["", "transformer.", "diffusion_model."])
def test_targets_of_every_family(choice, prefix):
    kinds = {"attention": {"attention"}, "attention_mlp": {"attention", "mlp"}, "all": {"attention", "mlp", "other"}}
    wanted = [prefix + name for name, kind in NAMES.items() if kind in kinds[choice]]
    assert choose_targets((prefix + name for name in NAMES), choice) == wanted


def test_no_target_and_no_such_choice_are_errors():
    with pytest.raises(ValueError, match="choose 'all'"):
        choose_targets(["proj_out"], "attention")
    with pytest.raises(ValueError, match="attention_mlp"):
        choose_targets(["proj_out"], "everything")


def test_factors_start_uniform_and_at_zero():
    start = init_factors("a.layer", 32, 400, 50, seed=3)
    assert start.a.shape == (32, 400) and start.b.shape == (50, 32)
    assert not start.b.any()
    bound = 1 / math.sqrt(400)
    assert start.a.abs().max() <= bound
    # Kolmogorov-Smirnov against the uniform distribution on +-bound.
    assert stats.kstest(start.a.flatten().numpy(), "uniform", (-bound, 2 * bound)).pvalue > 0.01


def test_factors_depend_on_name_and_seed_alone():
    start = init_factors("a.layer", 4, 8, 6, seed=3)
    torch.manual_seed(1)
    again = init_factors("a.layer", 4, 8, 6, seed=3)
    assert torch.equal(start.a, again.a)
    for other in (init_factors("b.layer", 4, 8, 6, seed=3), init_factors("a.layer", 4, 8, 6, seed=4)):
        assert not torch.equal(start.a, other.a)
