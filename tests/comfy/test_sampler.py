"""SDE Sampler in a running ComfyUI, on a small SD3-layout model: against euler, against rollouts, and by hand."""

import hashlib
import math
import uuid

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sfgrpo.kernels import KERNELS, SCHEDULES, Kernel
from sfgrpo.noise import generator_for
from sfgrpo.rollout import rollout
from sfgrpo.shapes import MODEL_DIR

SEED = 7
STEPS = 6
NOISY = [("ddim", schedule) for schedule in SCHEDULES] + [("flow_grpo", "annealed"), ("dance", "annealed")]
ETA = {"ddim": 0.7, "flow_grpo": 0.7, "dance": 0.3, "ode": 0.7}


class Graph:
    """An API prompt on a small model; `run` gives the latents that were asked for and what Probe_Record saw."""

    def __init__(self, server, **latent):
        self.server, self.records, self.saved = server, {}, {}
        self.mark = uuid.uuid4().hex
        folder = server.base / "models" / "diffusion_models" / "tiny_sd3.safetensors"
        weights = MODEL_DIR / "transformer" / "diffusion_pytorch_model.safetensors"
        if not folder.exists():
            folder.symlink_to(weights)
        with safe_open(weights, "pt") as file:
            width = file.get_slice("context_embedder.weight").get_shape()[1]
            pooled = file.get_slice("time_text_embed.text_embedder.linear_1.weight").get_shape()[1]
        self.nodes = {}
        self.model = self.add("UNETLoader", unet_name="tiny_sd3.safetensors", weight_dtype="default")
        self.positive = self.add("Probe_Conditioning", seed=1, width=width, pooled=pooled)
        self.negative = self.add("Probe_Conditioning", seed=2, width=width, pooled=pooled)
        self.sigmas = self.add(
            "SFGRPO_FlowSigmas", steps=STEPS, family="sd3", shift=0.0, width=64, height=64, denoise=1.0
        )
        self.latent = self.empty(1)

    def add(self, kind, *, slot=0, **inputs):
        """Add a node; returns a link to one of its outputs."""
        name = str(len(self.nodes) + 1)
        self.nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, slot]

    def need(self, kind, **choices):
        """Skip the test where ComfyUI is older than a node, or than a choice of one."""
        info = self.server.get("/object_info").get(kind)
        if info is None or any(choices[name] not in info["input"]["required"][name][0] for name in choices):
            pytest.skip(f"this ComfyUI has no {kind} {' '.join(choices.values())}")

    def empty(self, batch, size=64):
        return self.add("EmptySD3LatentImage", width=size, height=size, batch_size=batch)

    def kernel(self, kernel="ddim", eta=None, schedule="annealed", start=0, end=10000, offset=0):
        return self.add(
            "SFGRPO_SDESampler",
            kernel=kernel,
            eta=ETA[kernel] if eta is None else eta,
            schedule=schedule,
            window_start=start,
            window_end=end,
            noise_seed_offset=offset,
        )

    def euler(self):
        return self.add("KSamplerSelect", sampler_name="euler")

    def sample(self, name, sampler, *, seed=SEED, cfg=4.0, noise=True, **other):
        """Sampler Custom, recorded and saved under `name`; returns the latent."""
        self.records[name] = f"{name}_{self.mark}"
        latent = self.add(
            "SamplerCustom",
            model=other.get("model", self.model),
            add_noise=noise,
            noise_seed=seed,
            cfg=cfg,
            positive=other.get("positive", self.positive),
            negative=other.get("negative", self.negative),
            sampler=self.add("Probe_Record", sampler=sampler, name=self.records[name]),
            sigmas=other.get("sigmas", self.sigmas),
            latent_image=other.get("latent", self.latent),
        )
        self.save(name, latent)
        return latent

    def sample_advanced(self, name, sampler, *, seed=SEED, cfg=4.0):
        """The same through Sampler Custom Advanced."""
        guider = self.add("CFGGuider", model=self.model, positive=self.positive, negative=self.negative, cfg=cfg)
        latent = self.add(
            "SamplerCustomAdvanced",
            noise=self.add("RandomNoise", noise_seed=seed),
            guider=guider,
            sampler=sampler,
            sigmas=self.sigmas,
            latent_image=self.latent,
        )
        self.save(name, latent)

    def save(self, name, latent):
        self.saved[name] = self.add("SaveLatent", samples=latent, filename_prefix=f"{self.mark}/{name}")[0]

    def run(self):
        """name -> latent of each save. The recordings are then at `record`."""
        outcome = self.server.run(self.nodes)
        assert outcome.status == "success", outcome.error
        latents = {}
        for name, node in self.saved.items():
            place = outcome.outputs[node]["latents"][0]
            latents[name] = load_file(self.server.output / place["subfolder"] / place["filename"])["latent_tensor"]
            assert latents[name].isfinite().all(), name
        return latents

    def record(self, name):
        return load_file(self.server.output / f"{self.records[name]}.safetensors")


@pytest.fixture
def graph(server):
    return Graph(server)


def expect_error(graph, sampler, **other):
    """The words of the error in which sampling ends."""
    graph.sample("fails", sampler, **other)
    outcome = graph.server.run(graph.nodes)
    assert outcome.status == "error"
    return outcome.error


def streams(record, seed=SEED, offset=0):
    """The generators that the images of a recording should have used; all their starting noises differ."""
    first = record["sigmas"][0].item()
    marks = [hashlib.blake2b(noise.numpy().tobytes(), digest_size=8).hexdigest() for noise in record["noise"]]
    return [generator_for(seed, offset, repr(first), mark, 0) for mark in marks]


def by_hand(kernel, schedule, x, x0, t, s):
    """Mean and std of a step in float64, from the papers' formulas, independent of sfgrpo.kernels."""
    x, x0, eta = x.double(), x0.double(), ETA[kernel]
    x1 = (x - (1 - t) * x0) / t
    v = x1 - x0
    if s == 0 or kernel == "ode":
        return x + (s - t) * v, 0.0
    if kernel == "ddim":
        share = {
            "as_printed": eta * math.sqrt(1 - t),
            "annealed": eta * math.sqrt(t),
            "constant": math.sin(eta * math.pi / 2),
        }[schedule]
        std = s * share
        return (1 - s) * x0 + math.sqrt(s * s - std * std) * x1, std
    a = eta if kernel == "dance" else eta * math.sqrt(t / (1 - (s if t == 1 else t)))
    dt = t - s
    mean = x * (1 - a * a / (2 * t) * dt) - v * (1 + a * a * (1 - t) / (2 * t)) * dt
    return mean, a * math.sqrt(dt)


def check_steps(record, kernel, schedule="annealed", *, noisy=None, generators=None, scale=1.0):
    """Every recorded step is the kernel's, with the noise of the image's own stream; Euler steps outside `noisy`."""
    sigmas = record["sigmas"].tolist()
    generators = streams(record) if generators is None else generators
    assert record["steps"].tolist() == list(range(len(sigmas) - 1))
    for k, (t, s) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
        x, x0, following = (record[key][i] for key, i in (("states", k), ("denoised", k), ("states", k + 1)))
        acting = kernel if noisy is None or k in noisy else "ode"
        mean, std = by_hand(acting, schedule, x, x0, t, s)
        if std > 0:
            noise = torch.stack([torch.randn(x.shape[1:], generator=g) for g in generators])
            mean = mean + std * scale * noise.double()
        torch.testing.assert_close(following.double(), mean, rtol=0, atol=2e-5)


def test_without_noise_every_kernel_is_euler(graph):
    graph.sample("euler", graph.euler())
    graph.sample_advanced("euler_advanced", graph.euler())
    silent = [("ode", 0.7), ("ddim", 0.0), ("flow_grpo", 0.0), ("dance", 0.0)]
    for kernel, eta in silent:
        graph.sample(kernel, graph.kernel(kernel, eta))
        graph.sample_advanced(f"{kernel}_advanced", graph.kernel(kernel, eta))
    graph.sample("noisy", graph.kernel())
    latents = graph.run()
    torch.testing.assert_close(latents["euler"], latents["euler_advanced"], rtol=0, atol=0)
    for kernel, _ in silent:
        for name in (kernel, f"{kernel}_advanced"):
            torch.testing.assert_close(latents[name], latents["euler"], rtol=0, atol=1e-5)
    assert (latents["noisy"] - latents["euler"]).abs().mean() > 0.05


def test_same_seed_same_latent(graph):
    sampler = graph.kernel()
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        graph.sample(name, sampler, seed=seed)
    graph.sample("offset", graph.kernel(offset=1), seed=5)
    graph.sample_advanced("advanced", sampler, seed=5)
    latents = graph.run()
    assert torch.equal(latents["first"], latents["again"])
    assert torch.equal(latents["first"], latents["advanced"])
    assert (latents["first"] - latents["other"]).abs().mean() > 0.05
    assert (latents["first"] - latents["offset"]).abs().mean() > 0.05
    assert torch.equal(graph.record("first")["noise"], graph.record("offset")["noise"])
    check_steps(graph.record("offset"), "ddim", generators=streams(graph.record("offset"), seed=5, offset=1))


@pytest.mark.parametrize("kernel", ("ddim", "flow_grpo", "dance"))
def test_an_image_is_the_same_alone_and_in_a_batch(graph, kernel):
    sampler, four = graph.kernel(kernel), graph.empty(4)
    graph.sample("four", sampler, latent=four)
    graph.sample("one", sampler)
    graph.sample("third", sampler, latent=graph.add("LatentFromBatch", samples=four, batch_index=2, length=1))
    latents = graph.run()
    torch.testing.assert_close(latents["one"], latents["four"][:1], rtol=0, atol=1e-4)
    torch.testing.assert_close(latents["third"], latents["four"][2:3], rtol=0, atol=1e-4)
    assert (latents["one"] - latents["third"]).abs().mean() > 0.05


@pytest.mark.parametrize("kernel, schedule", NOISY)
def test_every_step_is_the_kernels(graph, kernel, schedule):
    graph.sample("batch", graph.kernel(kernel, schedule=schedule), latent=graph.empty(3))
    latent = graph.run()["batch"]
    record = graph.record("batch")
    check_steps(record, kernel, schedule)

    # The same as a rollout of the core along the recorded predictions.
    sigmas = record["sigmas"]
    at = {t: k for k, t in enumerate(sigmas.tolist())}

    def velocity(x, sigma, cond):
        return (x - record["denoised"][at[sigma[0].item()]]) / sigma[0]

    again = rollout(
        velocity,
        record["states"][0],
        sigmas,
        torch.arange(3),
        kernel=Kernel(name=kernel, eta=ETA[kernel], schedule=schedule),
        generators=streams(record),
    )
    torch.testing.assert_close(record["final"], again.final, rtol=0, atol=2e-5)
    # What ComfyUI gives out is SD3's latents before scale and shift.
    torch.testing.assert_close(latent, record["final"] / 1.5305 + 0.0609, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_image_to_image(graph, kernel):
    source = graph.add("Probe_RandomLatent", shape="2,16,8,8", seed=3)
    half = graph.add("SFGRPO_FlowSigmas", steps=STEPS, family="sd3", shift=0.0, width=64, height=64, denoise=0.5)
    graph.sample("flow", graph.kernel(kernel), latent=source, sigmas=half)
    basic = graph.add("BasicScheduler", model=graph.model, scheduler="simple", steps=STEPS, denoise=0.5)
    graph.sample("basic", graph.kernel(kernel), latent=source, sigmas=basic)
    graph.save("source", source)
    source = graph.run()["source"]
    noise = torch.randn(source.shape, generator=torch.Generator().manual_seed(SEED))
    for name in ("flow", "basic"):
        record = graph.record(name)
        t = record["sigmas"][0].item()
        assert len(record["sigmas"]) == STEPS + 1 and 0.5 < t < 0.9
        start = t * noise + (1 - t) * (source - 0.0609) * 1.5305
        torch.testing.assert_close(record["states"][0], start, rtol=0, atol=1e-5)
        check_steps(record, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inpainting_keeps_the_rest(graph, kernel):
    source = graph.add("Probe_RandomLatent", shape="2,16,8,8", seed=4)
    masked = graph.add("SetLatentNoiseMask", samples=source, mask=[source[0], 1])
    graph.sample("inpainted", graph.kernel(kernel), latent=masked)
    graph.sample("euler", graph.euler(), latent=masked)
    graph.save("source", source)
    latents = graph.run()
    kept, drawn = slice(4, None), slice(0, 4)
    torch.testing.assert_close(
        latents["inpainted"][..., kept], latents["source"][..., kept], rtol=0, atol=1e-6, msg="outside the mask"
    )
    assert (latents["inpainted"] - latents["source"])[..., drawn].abs().mean() > 0.3
    if kernel == "ode":
        torch.testing.assert_close(latents["inpainted"], latents["euler"], rtol=0, atol=1e-5)
    record = graph.record("inpainted")
    check_steps(record, kernel)
    if kernel in ("ode", "ddim"):
        # Outside the mask too, the latent carries noise of the size that the model expects; the others overshoot.
        given = (latents["source"] - 0.0609) * 1.5305
        for k, t in enumerate(record["sigmas"][:-1].tolist()):
            noise = ((record["states"][k] - (1 - t) * given) / t)[..., kept]
            assert noise.std().item() == pytest.approx(1, abs=0.1)


def test_video_latents(graph):
    wan = graph.add("Probe_TinyWan")
    cond = [graph.add("Probe_Conditioning", seed=seed, width=4096, pooled=8) for seed in (1, 2)]
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=9, batch_size=2)
    other = {"model": wan, "positive": cond[0], "negative": cond[1], "latent": latent}
    graph.sample("euler", graph.euler(), **other)
    graph.sample("ode", graph.kernel("ode"), **other)
    for kernel in ("ddim", "flow_grpo", "dance"):
        graph.sample(kernel, graph.kernel(kernel), **other)
    latents = graph.run()
    assert latents["ddim"].shape == (2, 16, 3, 8, 8)
    torch.testing.assert_close(latents["ode"], latents["euler"], rtol=0, atol=1e-5)
    for kernel in ("ddim", "flow_grpo", "dance"):
        check_steps(graph.record(kernel), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_samplers_in_a_row(graph, kernel):
    high = graph.add("SplitSigmas", sigmas=graph.sigmas, step=3)
    first = graph.sample("first", graph.kernel(kernel), sigmas=high, latent=graph.empty(2))
    graph.sample("second", graph.kernel(kernel), sigmas=[high[0], 1], latent=first, noise=False)
    graph.sample("whole", graph.kernel(kernel), latent=graph.empty(2))
    latents = graph.run()
    first, second, whole = (graph.record(name) for name in ("first", "second", "whole"))
    assert first["sigmas"][-1] == second["sigmas"][0] > 0 and second["sigmas"][-1] == 0
    torch.testing.assert_close(first["states"], whole["states"][:4], rtol=0, atol=0)
    torch.testing.assert_close(second["states"][0], whole["states"][3], rtol=0, atol=1e-5)
    if kernel == "ode":
        # Between the two ComfyUI divides by 1 - sigma and multiplies again, and rounding goes on through the steps.
        torch.testing.assert_close(latents["second"], latents["whole"], rtol=0, atol=1e-4)
    # Without noise of its own, the second tells the images apart by their order.
    mark = hashlib.blake2b(bytes(4 * 16 * 8 * 8), digest_size=8).hexdigest()
    level = repr(second["sigmas"][0].item())
    check_steps(second, kernel, generators=[generator_for(SEED, 0, level, mark, i) for i in range(2)])
    check_steps(first, kernel)


@pytest.mark.parametrize("kernel", ("ddim", "flow_grpo", "dance"))
@pytest.mark.parametrize("start, end, noisy", ((2, 4, {2, 3}), (0, 1, {0}), (3, 10000, {3, 4, 5}), (5, 6, {5})))
def test_outside_the_window_steps_are_eulers(graph, kernel, start, end, noisy):
    graph.sample("window", graph.kernel(kernel, start=start, end=end))
    graph.run()
    check_steps(graph.record("window"), kernel, noisy=noisy)


def test_noise_scale_of_the_model(graph):
    graph.need("ModelNoiseScale")
    model = graph.add("ModelNoiseScale", model=graph.model, noise_scale=3.0)
    graph.sample("scaled", graph.kernel(), model=model)
    graph.sample("euler", graph.euler(), model=model)
    graph.sample("ode", graph.kernel("ode"), model=model)
    latents = graph.run()
    torch.testing.assert_close(latents["ode"], latents["euler"], rtol=0, atol=1e-5)
    record = graph.record("scaled")
    torch.testing.assert_close(record["states"][0], 3 * record["noise"], rtol=0, atol=1e-5)
    check_steps(record, "ddim", scale=3.0)


def test_the_denoised_output_is_the_last_prediction(graph):
    graph.sample("run", graph.kernel())
    node = next(n for n in graph.nodes if graph.nodes[n]["class_type"] == "SamplerCustom")
    graph.save("denoised", [node, 1])
    latents = graph.run()
    last = graph.record("run")["denoised"][-1] / 1.5305 + 0.0609
    torch.testing.assert_close(latents["denoised"], last, rtol=0, atol=1e-5)
    torch.testing.assert_close(latents["run"], last, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampling", ("eps", "v_prediction", "img_to_img_flow"))
def test_another_kind_of_model_gets_one_sentence(graph, sampling):
    graph.need("ModelSamplingDiscrete", sampling=sampling)
    model = graph.add("ModelSamplingDiscrete", model=graph.model, sampling=sampling, zsnr=False)
    error = expect_error(graph, graph.kernel(), model=model)
    assert error == (
        "SDE Sampler works with flow models only (SD3, FLUX, Qwen-Image, Z-Image, Wan and the like), and this SD3 "
        "model is set up as another kind; use a sampler of KSamplerSelect with it, such as euler_ancestral or "
        "dpmpp_2m_sde."
    )


@pytest.mark.parametrize(
    "sigmas, words",
    (
        ("1, 0.5, 0.6, 0", "the sigmas must fall at every step, but step 1 goes from 0.5 to 0.6; use fewer steps"),
        ("1, 0.5, 0.5, 0", "step 1 goes from 0.5 to 0.5"),
        (
            "14.6, 3, 1, 0",
            "the sigmas of a flow model lie between 1 and 0, and these go from 14.6 to 0; use Flow Sigmas",
        ),
        ("0, 1", "step 0 goes from 0 to 1"),
    ),
)
def test_odd_sigmas_are_named(graph, sigmas, words):
    assert words in expect_error(graph, graph.kernel(), sigmas=graph.add("Probe_ManualSigmas", sigmas=sigmas))


@pytest.mark.parametrize(
    "options, words",
    (
        ({"start": 6}, "window_start is 6 (steps count from 0), but the sigmas have 6 steps; lower it"),
        ({"start": 3, "end": 3}, "window_start (3) must be below window_end (3)"),
        ({"eta": 1.5}, "eta of the ddim kernel must be 0 to 1, got 1.5"),
    ),
)
def test_settings_that_do_not_fit_are_named(graph, options, words):
    assert words in expect_error(graph, graph.kernel(**options))


def test_no_step_changes_nothing(graph):
    source = graph.add("Probe_RandomLatent", shape="1,16,8,8", seed=5)
    graph.sample("one", graph.kernel(), latent=source, sigmas=graph.add("Probe_ManualSigmas", sigmas="0.25"))
    graph.sample("none", graph.kernel(), latent=source, sigmas=graph.add("Probe_ManualSigmas", sigmas=""))
    graph.save("source", source)
    latents = graph.run()
    record = graph.record("one")
    noise, given = record["noise"], (latents["source"] - 0.0609) * 1.5305
    torch.testing.assert_close(record["final"], 0.25 * noise + 0.75 * given, rtol=0, atol=1e-6)
    assert record["steps"].numel() == 0
    assert torch.equal(latents["none"], latents["source"])
