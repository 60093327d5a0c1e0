"""Load Shapes Demo Model: MODEL, CLIP and VAE against diffusers' pipeline, and stock nodes on them."""

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from sfgrpo.export import file_hash
from sfgrpo.rewards.shapes import verify
from sfgrpo.shapes import MODEL_DIR
from sfgrpo.shapes.captions import all_captions, parse
from sfgrpo.shapes.scenes import render, scenes_for
from tests.comfyui import run_alone

ROOT = Path(__file__).parents[2]
TEXTS = {
    "empty": "",
    "short": "a red circle",
    "comma": "a red circle, and a BLUE square.",
    "ten words": "a red circle left of a blue square and a",
    "eleven words": "a red circle left of a blue square and a cross",
    "long": "a red circle and a blue square " * 5,
    "end inside": "a circle <|endoftext|> a square",
    "brackets": "a (red) circle",
}
SENT = TEXTS | {"brackets": r"a \(red\) circle", "weighted": "a (red:1.2) circle", "nested": "a ((red)) circle"}
TOO_LONG = ("eleven words", "long")
SEED = 5
STEPS = 8


@pytest.fixture(scope="module")
def pipe() -> StableDiffusion3Pipeline:
    """diffusers' own pipeline, without T5."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        MODEL_DIR, text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def encode(pipe, text: str):
    """Context and pooled output, each with a batch of one."""
    context, _, pooled, _ = pipe.encode_prompt(
        text, None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    return context, pooled


@torch.no_grad()
def to_latents(pipe, images):
    """Latents of the transformer of images (B, 3, H, W) in [0, 1]."""
    own = pipe.vae.encode(images * 2 - 1).latents
    return (own - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor


@torch.no_grad()
def to_images(pipe, latents):
    own = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    return (pipe.vae.decode(own).sample / 2 + 0.5).clamp(0, 1)


def weights_hashes() -> list[str]:
    return [file_hash(path) for path in sorted(MODEL_DIR.rglob("*.safetensors"))]


@pytest.fixture(scope="module")
def parts(pipe, server, tmp_path_factory):
    """(inputs, what ComfyUI made of them, what the process said)."""
    folder = tmp_path_factory.mktemp("parts")
    generator = torch.Generator().manual_seed(1)
    config = pipe.transformer.config
    images = torch.cat(
        [
            render(scenes_for(all_captions()[1::40], torch.Generator().manual_seed(2))),
            torch.rand(2, 3, 32, 32, generator=generator),
        ]
    )
    inputs = {
        "x": torch.randn(3, config.in_channels, 8, 8, generator=generator),
        "sigma": torch.tensor([1.0, 0.6, 0.05]),
        "context": torch.randn(3, 12, config.joint_attention_dim, generator=generator),
        "pooled": torch.randn(3, config.pooled_projection_dim, generator=generator),
        "images": images.movedim(1, -1),
        "latents": to_latents(pipe, images),
    }
    save_file({k: v.contiguous() for k, v in inputs.items()}, folder / "in.safetensors")
    process = subprocess.run(
        [
            *(sys.executable, Path(__file__).with_name("shapes_in_comfyui.py"), ROOT, folder / "in.safetensors"),
            *(json.dumps(list(SENT.values())), folder / "out.safetensors"),
        ],
        cwd=Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser(),
        env=os.environ | {"PYTHONPATH": str(server.base / "blocked"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    said = json.loads(process.stdout.strip().splitlines()[-1])
    return inputs, load_file(folder / "out.safetensors"), said


def test_transformer_is_that_of_diffusers(pipe, parts):
    inputs, out, _ = parts
    with torch.no_grad():
        expected = pipe.transformer(
            hidden_states=inputs["x"],
            timestep=inputs["sigma"] * 1000,
            encoder_hidden_states=inputs["context"],
            pooled_projections=inputs["pooled"],
            return_dict=False,
        )[0]
    torch.testing.assert_close(out["velocity"], expected, rtol=0, atol=1e-4)
    assert torch.equal(out["velocity_again"], out["velocity"])


@pytest.mark.parametrize("name", TEXTS)
def test_conditioning_is_that_of_diffusers(pipe, parts, name):
    _, out, _ = parts
    context, pooled = encode(pipe, TEXTS[name])
    i = list(SENT).index(name)
    assert context.shape == (1, 12, pipe.transformer.config.joint_attention_dim)
    torch.testing.assert_close(out[f"text{i}.context"], context, rtol=0, atol=1e-4)
    torch.testing.assert_close(out[f"text{i}.pooled"], pooled, rtol=0, atol=1e-4)


def test_texts_differ_in_their_conditioning(parts):
    _, out, _ = parts
    short, empty = (out[f"text{list(SENT).index(name)}.context"] for name in ("short", "empty"))
    assert (short - empty).abs().max() > 0.1


@pytest.mark.parametrize(("name", "weight"), [("weighted", 1.2), ("nested", 1.1**2)])
def test_a_weight_moves_one_token_away_from_the_empty_text(pipe, parts, name, weight):
    _, out, _ = parts
    context, pooled = encode(pipe, "a red circle")
    empty, _ = encode(pipe, "")
    expected = context.clone()
    expected[0, 2] += (weight - 1) * (context - empty)[0, 2]
    i = list(SENT).index(name)
    torch.testing.assert_close(out[f"text{i}.context"], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(out[f"text{i}.pooled"], pooled, rtol=0, atol=1e-4)


def test_sd3_text_node(pipe, parts):
    """One text for each encoder; no padding means no tokens, and so zeros."""
    _, out, _ = parts
    (context, pooled), (empty, empty_pooled) = encode(pipe, "a red circle"), encode(pipe, "")
    width, projection = pipe.text_encoder.config.hidden_size, pipe.text_encoder.config.projection_dim
    half = torch.cat([empty[..., :width], context[..., width:]], -1)
    half_pooled = torch.cat([empty_pooled[:, :projection], pooled[:, projection:]], -1)
    for name, expected in {
        "sd3_both": (context, pooled),
        "sd3_one": (half, half_pooled),
        "sd3_empty": (empty, empty_pooled),
        "sd3_none": (torch.zeros_like(context), torch.zeros_like(pooled)),
        "after_last_layer": (context, pooled),
    }.items():
        for key, value in zip(("context", "pooled"), expected, strict=True):
            torch.testing.assert_close(out[f"{name}.{key}"], value, rtol=0, atol=1e-4)
    assert (out["last_layer.context"] - context).abs().max() > 0.1
    torch.testing.assert_close(out["last_layer.pooled"], pooled, rtol=0, atol=1e-4)


def test_vae_is_that_of_diffusers(pipe, parts):
    inputs, out, _ = parts
    images = to_images(pipe, inputs["latents"]).movedim(1, -1)
    for name in ("decoded", "decoded_tiled"):
        torch.testing.assert_close(out[name], images, rtol=0, atol=1e-4)
    for name in ("encoded", "encoded_tiled"):
        torch.testing.assert_close(out[name], inputs["latents"], rtol=0, atol=1e-4)
    side = pipe.transformer.config.sample_size
    assert torch.equal(out["empty"], torch.zeros(1, pipe.transformer.config.in_channels, side, side))


def test_previews_show_the_picture(pipe, parts):
    inputs, out, said = parts
    if not said["later"]["previews"]:
        pytest.skip("this ComfyUI cannot decode previews by other means than its own")
    expected = to_images(pipe, inputs["latents"]).movedim(1, -1) * 255
    assert out["previews"].dtype == torch.uint8
    assert (out["previews"].float() - expected).abs().max() <= 1.01


def test_nothing_is_logged_or_needed_beyond_comfyui(parts):
    """But that a text is too long, once for each."""
    _, _, said = parts
    cut = [["WARNING", f"the shapes model reads 10 words; the rest is left out: {TEXTS[name]}"] for name in TOO_LONG]
    assert (said["log"], said["forbidden"]) == (cut, [])


def graph(caption: str, sigmas: torch.Tensor, *, cfg: float, seed: int = SEED, lora: str | None = None) -> dict:
    """Two pictures by SamplerCustomAdvanced, saved as latents."""
    prompt = {
        "load": ("SFGRPO_LoadShapesDemo", {}),
        "positive": ("CLIPTextEncode", {"clip": ["load", 1], "text": caption}),
        "negative": ("CLIPTextEncode", {"clip": ["load", 1], "text": "a green cross"}),
        "noise": ("RandomNoise", {"noise_seed": seed}),
        "sampler": ("KSamplerSelect", {"sampler_name": "euler"}),
        "sigmas": ("Probe_ManualSigmas", {"sigmas": ", ".join(f"{s:.9f}" for s in sigmas.tolist())}),
        "guider": (
            "CFGGuider",
            {"model": ["load", 0], "positive": ["positive", 0], "negative": ["negative", 0], "cfg": cfg},
        ),
        "two": ("RepeatLatentBatch", {"samples": ["load", 3], "amount": 2}),
        "sample": (
            "SamplerCustomAdvanced",
            {
                "noise": ["noise", 0],
                "guider": ["guider", 0],
                "sampler": ["sampler", 0],
                "sigmas": ["sigmas", 0],
                "latent_image": ["two", 0],
            },
        ),
        "save": ("SaveLatent", {"samples": ["sample", 0], "filename_prefix": "latents/shapes"}),
    }
    if lora is not None:
        prompt["lora"] = ("LoraLoaderModelOnly", {"model": ["load", 0], "lora_name": lora, "strength_model": 1.0})
        prompt["guider"][1]["model"] = ["lora", 0]
    return api(prompt)


def api(prompt: dict) -> dict:
    return {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in prompt.items()}


def latents(server, outcome, node: str = "save") -> torch.Tensor:
    """Latents of the transformer that a SaveLatent wrote."""
    assert outcome.status == "success", outcome.error
    (entry,) = outcome.outputs[node]["latents"]
    saved = load_file(server.output / entry["subfolder"] / entry["filename"])["latent_tensor"]
    # ComfyUI's numbers for SD3.
    return (saved - 0.0609) * 1.5305


def pictures(server, outcome, node: str) -> np.ndarray:
    assert outcome.status == "success", outcome.error
    files = [server.output / entry["subfolder"] / entry["filename"] for entry in outcome.outputs[node]["images"]]
    return np.stack([np.array(Image.open(file)) for file in files]).astype(np.int16)


def noise(pipe, batch: int, seed: int = SEED) -> torch.Tensor:
    """ComfyUI's initial noise."""
    side = pipe.transformer.config.sample_size
    return torch.randn(batch, pipe.transformer.config.in_channels, side, side, generator=torch.manual_seed(seed))


def by_pipeline(pipe, caption: str, *, cfg: float) -> torch.Tensor:
    return pipe(
        [caption] * 2,
        negative_prompt=["a green cross"] * 2,
        num_inference_steps=STEPS,
        guidance_scale=cfg,
        max_sequence_length=0,
        latents=noise(pipe, 2),
        output_type="latent",
    ).images


def grid(pipe) -> torch.Tensor:
    pipe.scheduler.set_timesteps(STEPS)
    return pipe.scheduler.sigmas


@pytest.mark.parametrize("cfg", [1.0, 4.5])
def test_stock_graph_gives_the_latents_of_the_pipeline(server, pipe, cfg):
    got = latents(server, server.run(graph("two blue squares", grid(pipe), cfg=cfg)))
    torch.testing.assert_close(got, by_pipeline(pipe, "two blue squares", cfg=cfg), rtol=0, atol=1e-4)


def test_live_previews_are_pictures(server, pipe, parts):
    """One a step, through the websocket as the frontend gets them; the last is the finished picture."""
    if not parts[2]["later"]["previews"]:
        pytest.skip("this ComfyUI cannot decode previews by other means than its own")
    prompt = graph("a yellow square", grid(pipe), cfg=1.0)

    async def run() -> list[bytes]:
        frames = []
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/ws?clientId=previews") as ws:
            body = {"prompt": prompt, "client_id": "previews", "extra_data": {"preview_method": "latent2rgb"}}
            await session.post(f"{server.url}/prompt", json=body)
            async for message in ws:
                if message.type == aiohttp.WSMsgType.BINARY and message.data[:4] == b"\0\0\0\1":
                    frames.append(message.data[8:])
                elif message.type == aiohttp.WSMsgType.TEXT:
                    event = json.loads(message.data)
                    if event["type"] in ("execution_success", "execution_error"):
                        return frames
        return frames

    frames = [Image.open(io.BytesIO(frame)) for frame in run_alone(asyncio.wait_for(run(), 120))]
    expected = to_images(pipe, by_pipeline(pipe, "a yellow square", cfg=1.0)[:1])[0].movedim(0, -1).numpy() * 255
    assert len(frames) == STEPS
    small = [np.array(frame.convert("RGB").resize((32, 32), Image.Resampling.BOX)) for frame in frames]
    errors = [np.abs(picture - expected).mean() for picture in small]
    assert errors[-1] < 3 < errors[0]  # the loss of JPEG, and a first guess


def test_lora_file_changes_it_as_in_diffusers(server, pipe):
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for name, module in pipe.transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            a, b = torch.randn(4, module.in_features, generator=generator), torch.randn(module.out_features, 4)
            b = torch.randn(b.shape, generator=generator)
            factors[f"transformer.{name}.lora_A.weight"] = 0.05 * a
            factors[f"transformer.{name}.lora_B.weight"] = 0.05 * b
    file = server.base / "models" / "loras" / "shapes_demo_test.safetensors"
    save_file(factors, file)
    before = len(server.log())
    plain = latents(server, server.run(graph("a circle", grid(pipe), cfg=1.0)))
    got = latents(server, server.run(graph("a circle", grid(pipe), cfg=1.0, lora=file.name)))
    after = latents(server, server.run(graph("a circle", grid(pipe), cfg=1.0)))
    assert "not loaded" not in server.log()[before:].lower()
    pipe.load_lora_weights(str(file))
    try:
        expected = by_pipeline(pipe, "a circle", cfg=1.0)
    finally:
        pipe.unload_lora_weights()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert (got - plain).abs().max() > 0.1
    assert torch.equal(after, plain)


def test_second_run_is_from_the_cache_and_unloading_changes_nothing(server, pipe):
    before = weights_hashes()
    first = latents(server, server.run(graph("a cross", grid(pipe), cfg=2.0)))
    second = server.run(graph("a cross", grid(pipe), cfg=2.0, seed=6))
    (cached,) = [data["nodes"] for kind, data in second.messages if kind == "execution_cached"]
    assert "load" in cached and "sample" not in cached
    assert not torch.equal(latents(server, second), first)
    for body in ({"unload_models": True}, {"unload_models": True, "free_memory": True}):
        server.post("/free", body)
        again = server.run(graph("a cross", grid(pipe), cfg=2.0))
        assert torch.equal(latents(server, again), first)
    assert weights_hashes() == before


def test_api_workflow(server, pipe):
    """Every pixel against an Euler loop over diffusers' transformer, and the pictures show what was asked for."""
    prompt = json.loads((ROOT / "workflows" / "api" / "use_shapes_model.json").read_text())
    got = pictures(server, server.run(prompt), "7")
    sampling = prompt["5"]["inputs"]
    assert (sampling["sampler_name"], sampling["scheduler"]) == ("euler", "simple")
    steps, cfg = sampling["steps"], sampling["cfg"]
    times = torch.tensor([(1000 - i * 1000 // steps) / 1000 for i in range(steps)] + [0.0])
    sigmas = 3 * times / (1 + 2 * times)
    x = noise(pipe, 4, sampling["seed"])
    conds = [tuple(t.expand(4, *t.shape[1:]) for t in encode(pipe, prompt[i]["inputs"]["text"])) for i in ("2", "3")]
    for t, s in zip(sigmas[:-1], sigmas[1:], strict=True):
        with torch.no_grad():
            positive, negative = (
                pipe.transformer(
                    hidden_states=x,
                    timestep=t.expand(4) * 1000,
                    encoder_hidden_states=context,
                    pooled_projections=pooled,
                    return_dict=False,
                )[0]
                for context, pooled in conds
            )
        x = x + (s - t) * (negative + cfg * (positive - negative))
    expected = (to_images(pipe, x).movedim(1, -1).numpy() * 255).astype(np.int16)
    assert np.abs(got - expected).max() <= 1
    images = torch.from_numpy(got).movedim(-1, 1).float() / 255
    assert verify(images, [parse(prompt["2"]["inputs"]["text"])] * 4).strict.sum() >= 3


def test_stock_nodes(server, pipe, parts):
    """Empty latents of stock nodes, image to image, tiles, saved files: each branch against its twin."""

    def sample(latent, model=("load", 0), *, denoise=1.0):
        return (
            "KSampler",
            {
                "model": list(model),
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": [latent, 0],
                "seed": SEED,
                "steps": 4,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": denoise,
            },
        )

    def save(node):
        return "SaveLatent", {"samples": [node, 0], "filename_prefix": "latents/stock"}

    def image(node, kind="VAEDecode", **options):
        return kind, {"samples": [node, 0], "vae": ["load", 2]} | options

    tiles = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
    # Older versions make every empty latent for 8x.
    side = 32 if parts[2]["later"]["resizes"] else 64
    size = {"width": side, "height": side, "batch_size": 1}
    outcome = server.run(
        api(
            {
                "load": ("SFGRPO_LoadShapesDemo", {}),
                "positive": ("CLIPTextEncode", {"clip": ["load", 1], "text": "a purple triangle"}),
                "skip": ("CLIPSetLastLayer", {"clip": ["load", 1], "stop_at_clip_layer": -1}),
                "negative": (
                    "CLIPTextEncodeSD3",
                    {
                        "clip": ["skip", 0],
                        "clip_l": "a circle",
                        "clip_g": "",
                        "t5xxl": "",
                        "empty_padding": "none",
                    },
                ),
                "empty": ("EmptyLatentImage", size),
                "empty_sd3": ("EmptySD3LatentImage", size),
                **{f"from_{name}": sample(name) for name in ("empty", "empty_sd3")},
                "own": sample("own_latent"),
                "own_latent": ("RepeatLatentBatch", {"samples": ["load", 3], "amount": 1}),
                **{f"save_{name}": save(name) for name in ("own", "from_empty", "from_empty_sd3", "back")},
                "picture": image("own"),
                "tiled": image("own", "VAEDecodeTiled", **tiles),
                "show": ("SaveImage", {"images": ["picture", 0], "filename_prefix": "stock"}),
                "show_tiled": ("SaveImage", {"images": ["tiled", 0], "filename_prefix": "stock"}),
                "back": ("VAEEncode", {"pixels": ["picture", 0], "vae": ["load", 2]}),
                "more": sample("back", denoise=0.25),
                "more_picture": image("more"),
                "show_more": ("SaveImage", {"images": ["more_picture", 0], "filename_prefix": "stock"}),
                "keep": ("ModelSave", {"model": ["load", 0], "filename_prefix": "diffusion_models/shapes"}),
                "keep_clip": ("CLIPSave", {"clip": ["load", 1], "filename_prefix": "clip/shapes"}),
                "keep_vae": ("VAESave", {"vae": ["load", 2], "filename_prefix": "vae/shapes"}),
                "keep_all": (
                    "CheckpointSave",
                    {
                        "model": ["load", 0],
                        "clip": ["load", 1],
                        "vae": ["load", 2],
                        "filename_prefix": "checkpoints/shapes",
                    },
                ),
            }
        )
    )
    own = latents(server, outcome, "save_own")
    assert own.shape == noise(pipe, 1).shape
    for name in ("from_empty", "from_empty_sd3"):
        assert torch.equal(latents(server, outcome, f"save_{name}"), own)
    shown = pictures(server, outcome, "show")
    expected = (to_images(pipe, own).movedim(1, -1).numpy() * 255).astype(np.int16)
    assert np.abs(shown - expected).max() <= 1
    assert np.abs(pictures(server, outcome, "show_tiled") - shown).max() <= 1
    torch.testing.assert_close(
        latents(server, outcome, "save_back"), to_latents(pipe, to_images(pipe, own)), rtol=0, atol=1e-3
    )
    # A late restart keeps the picture: closer to it than two pictures are to each other.
    assert np.abs(pictures(server, outcome, "show_more") - shown).mean() < 20

    # The saved transformer, by a stock loader, with this CLIP and VAE.
    outcome = server.run(
        api(
            {
                "load": ("SFGRPO_LoadShapesDemo", {}),
                "stock": ("UNETLoader", {"unet_name": "shapes_00001_.safetensors", "weight_dtype": "default"}),
                "positive": ("CLIPTextEncode", {"clip": ["load", 1], "text": "a purple triangle"}),
                "negative": ("CLIPTextEncode", {"clip": ["load", 1], "text": ""}),
                "own_latent": ("RepeatLatentBatch", {"samples": ["load", 3], "amount": 1}),
                "own": sample("own_latent", ("stock", 0)),
                "picture": image("own"),
                "save": save("own"),
                "show": ("SaveImage", {"images": ["picture", 0], "filename_prefix": "stock"}),
            }
        )
    )
    torch.testing.assert_close(latents(server, outcome), own, rtol=0, atol=1e-4)
    assert np.abs(pictures(server, outcome, "show") - shown).max() <= 1
