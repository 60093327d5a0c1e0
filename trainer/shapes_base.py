"""Train the embedded shapes model from nothing, on the CPU, and write it as a diffusers folder.

    python -m trainer.shapes_base --out sfgrpo/shapes/model          # what was shipped, see docs/shapes.md

Reads top to bottom: (1) a small AutoencoderTiny on rendered pictures, (2) latents of many rendered scenes,
(3) a three-layer SD3Transformer2DModel and two small CLIP text models, jointly, by flow matching, (4) the EMA of
the weights in fp16 as a StableDiffusion3Pipeline folder. Progress goes to OUT/training.jsonl, and a run that was
stopped goes on from its last state with --resume.

SD3 without its T5 encoder pads the context with all-zero tokens: 256 of them in diffusers, none in ComfyUI. Equal
tokens stay equal through every layer, so n of them are one token whose attention logit is raised by log n. Training
draws n at random for each batch, and the model works with any.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from sfgrpo.schedule import shift_static
from sfgrpo.shapes.captions import CATEGORIES, all_captions
from sfgrpo.shapes.scenes import render, scenes_for

from .errors import UserError, out_folder

CONTEXT_LENGTH = 12
CATEGORY_WEIGHTS = dict(zip(CATEGORIES, (0.5, 1.0, 2.0, 0.5, 2.0, 2.0), strict=True))
DROP_CAPTION = 0.1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the words of all captions, padded with its end token as CLIP-L's is."""
    words = sorted({w for c in all_captions() for w in c.text.split()})
    vocab = {t: i for i, t in enumerate([*words, "<|unk|>", "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>",
        special_tokens=[(t, vocab[t]) for t in ("<|startoftext|>", "<|endoftext|>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<|unk|>",
        model_max_length=CONTEXT_LENGTH,
    )


def build_text_encoder(tokenizer: PreTrainedTokenizerFast) -> CLIPTextModelWithProjection:
    """A CLIP text model of width 64 and three layers; SD3 takes its next-to-last hidden state and its projection."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT_LENGTH,
            projection_dim=64,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_silent_t5(tokenizer: PreTrainedTokenizerFast) -> T5EncoderModel:
    """A T5 encoder whose output is exactly 0, as if there were none: diffusers loads no SD3 folder without one."""
    config = T5Config(
        vocab_size=len(tokenizer), d_model=128, d_kv=8, d_ff=8, num_layers=1, num_heads=1, use_cache=False
    )
    encoder = T5EncoderModel(config)
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder


def build_vae() -> AutoencoderTiny:
    """A stock AutoencoderTiny with 32 channels, 4x downscale and 16 latent channels."""
    return AutoencoderTiny(
        encoder_block_out_channels=(32, 32, 32),
        decoder_block_out_channels=(32, 32, 32),
        num_encoder_blocks=(1, 2, 2),
        num_decoder_blocks=(2, 2, 1),
        latent_channels=16,
    )


def build_transformer() -> SD3Transformer2DModel:
    """A stock SD3Transformer2DModel: 3 layers, 3 heads of 64, patch 2, rms-normed queries and keys."""
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=16,
        num_layers=3,
        attention_head_dim=64,
        num_attention_heads=3,
        joint_attention_dim=128,
        caption_projection_dim=192,
        pooled_projection_dim=128,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    for name, parameter in model.named_parameters():
        if ".norm1" in name and "linear" in name or name.startswith(("norm_out.linear", "proj_out")):
            nn.init.zeros_(parameter)
    return model


class CountedZeroTokenAttention:
    """SD3's joint attention where the last context token stands for n equal ones: its logit is raised by log n."""

    def __init__(self) -> None:
        self.bias = torch.zeros(1)
        """Broadcast to (batch, heads, queries, keys); set before each forward pass."""

    def __call__(
        self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: object
    ) -> tuple[Tensor, Tensor]:
        """(B, L, D) image and (B, M, D) context tokens to the same, as JointAttnProcessor2_0 does."""

        def heads(tokens: Tensor) -> Tensor:
            return tokens.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        x, c = hidden_states, encoder_hidden_states
        query = torch.cat([attn.norm_q(heads(attn.to_q(x))), attn.norm_added_q(heads(attn.add_q_proj(c)))], dim=2)
        key = torch.cat([attn.norm_k(heads(attn.to_k(x))), attn.norm_added_k(heads(attn.add_k_proj(c)))], dim=2)
        value = torch.cat([heads(attn.to_v(x)), heads(attn.add_v_proj(c))], dim=2)
        # Written out: for 29 tokens this is faster on the CPU than the fused attention's backward pass.
        logits = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5 + self.bias
        out = (logits.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(-2)
        out_x, out_c = out[:, : x.shape[1]], out[:, x.shape[1] :]
        return attn.to_out[0](out_x), out_c if attn.context_pre_only else attn.to_add_out(out_c)


class FlowModel(nn.Module):
    """Both text encoders and the transformer: token ids and a noised latent in, velocity out."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.text_encoder = build_text_encoder(tokenizer)
        self.text_encoder_2 = build_text_encoder(tokenizer)
        self.transformer = build_transformer()

    def forward(self, latents: Tensor, sigma: Tensor, input_ids: Tensor) -> Tensor:
        """(B, 16, 8, 8), (B,) and (B, 12) -> velocity (B, 16, 8, 8); the context ends in one zero token."""
        encoded = [e(input_ids, output_hidden_states=True) for e in (self.text_encoder, self.text_encoder_2)]
        context = F.pad(torch.cat([e.hidden_states[-2] for e in encoded], dim=-1), (0, 0, 0, 1))
        pooled = torch.cat([e.text_embeds for e in encoded], dim=-1)
        return self.transformer(latents, context, pooled, sigma * 1000, return_dict=False)[0]


def draw_pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random scenes as pictures (count, 3, 32, 32) uint8, and the index of the caption of each (count,)."""
    captions = all_captions()
    weight = torch.tensor([CATEGORY_WEIGHTS[c.category] for c in captions])
    for category in CATEGORIES:
        members = torch.tensor([c.category == category for c in captions])
        weight[members] /= members.sum()
    index = torch.multinomial(weight, count, replacement=True, generator=generator)
    pictures = torch.empty(count, 3, 32, 32, dtype=torch.uint8)
    for part in torch.arange(count).split(4096):
        images = render(scenes_for([captions[i] for i in index[part].tolist()], generator))
        pictures[part] = (images * 255).round().to(torch.uint8)
    return pictures, index


def to_model(pictures: Tensor) -> Tensor:
    """uint8 pictures as float32 in [-1, 1]."""
    return (pictures.float() / 127.5 - 1).to(memory_format=torch.channels_last)


def train_vae(
    pictures: Tensor, seconds: float, generator: torch.Generator, log
) -> tuple[AutoencoderTiny, float, float]:
    """Train the autoencoder; returns it with the shift and scale that make its latents mean 0 and std 1.

    Noise on the latents in training keeps the decoder smooth where the flow model will be a little off.
    """
    vae = build_vae().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    start, step = time.time(), 0
    while (share := (time.time() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * share))
        images = to_model(pictures[torch.randint(len(pictures), (64,), generator=generator)])
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(images).latents
            noised = latents + 0.05 * torch.randn(latents.shape, generator=generator)
            error = vae.decode(noised).sample.float() - images
        loss = error.square().mean() + 0.1 * error.abs().mean() + 1e-3 * latents.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            psnr = -10 * math.log10(error.square().mean().item() / 4)
            log(phase="vae", step=step, psnr=round(psnr, 2), latent_std=round(latents.std().item(), 3))
    with torch.no_grad():
        images = to_model(pictures[:1024])
        latents = vae.encode(images).latents
        psnr = -10 * math.log10((vae.decode(latents).sample - images).square().mean().item() / 4)
        log(phase="vae", step=step, psnr_clean=round(psnr, 2), seconds=round(time.time() - start))
        return vae, latents.mean().item(), 1 / latents.std().item()


def encode_all(vae: AutoencoderTiny, pictures: Tensor, shift: float, scale: float) -> Tensor:
    """Normalised latents of all pictures, (count, 16, 8, 8) fp16."""
    latents = torch.empty(len(pictures), 16, 8, 8, dtype=torch.float16)
    with torch.no_grad():
        for part in torch.arange(len(pictures)).split(256):
            latents[part] = ((vae.encode(to_model(pictures[part])).latents - shift) * scale).half()
    return latents


def build_optimizers(model: FlowModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the transformer blocks and text encoder layers, AdamW for all else."""
    muon, adam = [], []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and (".attn." in name or ".ff" in name or ".mlp." in name or ".self_attn." in name)
        (muon if hidden else adam).append(parameter)
    return [
        torch.optim.Muon(muon, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adam, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


@dataclass(frozen=True)
class Stage:
    """One cosine cycle of flow training."""

    minutes: float
    lr: float
    logit_normal: bool
    """Times: sigmoid of a normal, or else uniform; then shifted."""
    shift: float
    """Static shift of the times towards noise."""


def draw_sigmas(stage: Stage, count: int, generator: torch.Generator) -> Tensor:
    """Training times (count,) of a stage."""
    if stage.logit_normal:
        sigma = torch.sigmoid(torch.randn(count, generator=generator))
    else:
        sigma = torch.rand(count, generator=generator)
    return shift_static(sigma, stage.shift)


def train_flow(args, tokenizer, latents: Tensor, index: Tensor, state_file: Path, log) -> FlowModel:
    """Flow matching on (latent, caption) pairs in two stages; returns the EMA of the weights.

    Logit-normal times learn shapes and colours fast, but hardly see sigma > 0.9, where the layout, and with it the
    number of shapes, is decided; the second stage has the times at which the model is sampled.
    """
    stages = (
        Stage(args.minutes, args.lr, True, 1.5),
        Stage(args.finish_minutes, args.finish_lr, False, 3.0),
    )
    generator = torch.Generator().manual_seed(args.seed + 1)
    torch.manual_seed(args.seed + 2)
    model, ema = FlowModel(tokenizer), FlowModel(tokenizer)
    ema.load_state_dict(model.state_dict())
    attention = CountedZeroTokenAttention()
    model.transformer.set_attn_processor(attention)
    texts = [c.text for c in all_captions()] + [""]
    ids = tokenizer(texts, padding="max_length", max_length=CONTEXT_LENGTH, return_tensors="pt").input_ids
    optimizers = build_optimizers(model, args.lr)
    step, spent, first = 0, 0.0, 0
    if args.resume and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
        step, spent, first = state["step"], state["spent"], state["stage"]
    if args.compile:
        model.transformer.compile()
    running = None
    for number in range(first, len(stages)):
        stage, begun, start, saved = stages[number], step, time.time() - spent, time.time()
        while (share := (time.time() - start) / (60 * stage.minutes)) < 1:
            lr = stage.lr * min(1, (step - begun + 1) / 200) * max(0.5 * (1 + math.cos(math.pi * share)), 0.01)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
            pick = torch.randint(len(latents), (args.batch,), generator=generator)
            clean = latents[pick].float()
            noise = torch.randn(clean.shape, generator=generator)
            sigma = draw_sigmas(stage, args.batch, generator)
            drop = torch.rand(args.batch, generator=generator) < DROP_CAPTION
            caption = torch.where(drop, len(texts) - 1, index[pick])
            # n zero tokens: none in half of the batches, else 1 to 333, uniform in log n.
            draw = torch.rand(2, generator=generator).tolist()
            attention.bias = torch.zeros(1, 1, 1, 16 + CONTEXT_LENGTH + 1)
            attention.bias[..., -1] = -1e4 if draw[0] < 0.5 else math.log(333) * draw[1]
            mix = sigma.view(-1, 1, 1, 1)
            with torch.autocast("cpu", torch.bfloat16):
                velocity = model((1 - mix) * clean + mix * noise, sigma, ids[caption])
            loss = (velocity.float() - (noise - clean)).square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            decay = min(0.9995, (1 + step) / (10 + step))
            with torch.no_grad():
                torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
            running = loss.item() if running is None else running + 0.01 * (loss.item() - running)
            if step % 100 == 0:
                minutes = round((time.time() - start) / 60, 2)
                log(phase="flow", stage=number, step=step, loss=round(running, 4), lr=lr, minutes=minutes)
            if time.time() - saved > 120:
                saved = time.time()
                save_state(state_file, model, ema, optimizers, generator, step, number, time.time() - start)
        spent = 0.0
        save_state(state_file, model, ema, optimizers, generator, step, number + 1, spent)
    return ema


def save_state(
    path: Path, model, ema, optimizers, generator: torch.Generator, step: int, stage: int, spent: float
) -> None:
    """Write what a resumed run needs, whole or not at all."""
    state = {
        "model": model.state_dict(),
        "ema": ema.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "generator": generator.get_state(),
        "step": step,
        "stage": stage,
        "spent": spent,
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def save_pipeline(out: Path, tokenizer, vae, shift: float, scale: float, model: FlowModel) -> None:
    """Write a StableDiffusion3Pipeline folder with fp16 weights."""
    vae.register_to_config(scaling_factor=scale, shift_factor=shift)
    StableDiffusion3Pipeline(
        transformer=model.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=model.text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=model.text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=build_silent_t5(tokenizer),
        tokenizer_3=tokenizer,
    ).to(dtype=torch.float16).save_pretrained(out)
    # transformers 5 writes a class name that transformers 4 does not know; this one both do.
    for file in (out / "model_index.json", *out.glob("tokenizer*/tokenizer_config.json")):
        file.write_text(file.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    # Without a dtype asked for, transformers 5 loads in the one that the config names, diffusers in float32.
    for file in out.glob("text_encoder*/config.json"):
        file.write_text(file.read_text().replace('"float16"', '"float32"'))


def main() -> None:
    """Parse the command line and run all four parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_folder, required=True, help="folder of the finished model")
    parser.add_argument("--work", type=Path, default=Path("runs/shapes_base"), help="folder of states and log")
    parser.add_argument("--minutes", type=float, default=53, help="minutes of the first stage of flow training")
    parser.add_argument("--vae-minutes", type=float, default=4.5, help="minutes of autoencoder training")
    parser.add_argument("--scenes", type=int, default=200_000, help="rendered pictures")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--finish-minutes", type=float, default=78, help="minutes of the second stage")
    parser.add_argument("--finish-lr", type=float, default=8e-4, help="learning rate of the second stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    try:
        args = parser.parse_args()
    except UserError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    args.work.mkdir(parents=True, exist_ok=True)

    def log(**row: object) -> None:
        with (args.work / "training.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    tokenizer = build_tokenizer()
    generator = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    data_file = args.work / "data.pt"
    if args.resume and data_file.exists():
        data = torch.load(data_file, weights_only=True)
        vae = build_vae()
        vae.load_state_dict(data["vae"])
    else:
        pictures, index = draw_pictures(args.scenes, generator)
        vae, shift, scale = train_vae(pictures, 60 * args.vae_minutes, generator, log)
        latents = encode_all(vae, pictures, shift, scale)
        data = {"vae": vae.state_dict(), "shift": shift, "scale": scale, "latents": latents, "index": index}
        torch.save(data, data_file)
    model = train_flow(args, tokenizer, data["latents"], data["index"], args.work / "state.pt", log)
    save_pipeline(args.out, tokenizer, vae, data["shift"], data["scale"], model)


if __name__ == "__main__":
    main()
