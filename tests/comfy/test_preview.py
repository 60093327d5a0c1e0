"""Tweedie Reward Preview in a running ComfyUI: against diffusers, against other nodes, previews, Cancel, mistakes."""

import json
import struct
import uuid
from io import BytesIO
from pathlib import Path

import aiohttp
import pytest
import torch
from PIL import Image

from sfgrpo.kernels import Kernel
from sfgrpo.probe import probe
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import mix
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import LoRAPolicy, encode_prompts
from tests.comfyui import run_alone

WORKFLOW = Path(__file__).parents[2] / "workflows" / "api" / "reward_preview.json"
TEXTS = ["two red circles", "a green cross"]
SMALL = {
    "prompts": "\n".join(TEXTS),
    "width": 32,
    "height": 32,
    "steps": 5,
    "guidance": 1.0,
    "trajectories": 2,
    "substeps": 1,
    "seed": 4,
    "kernel": "ddim",
    "eta": 0.7,
    "schedule": "annealed",
    "batch_size": 8,
}


class Graph:
    """An API prompt around one preview of the demo model by the soft verifier."""

    def __init__(self, server):
        self.server, self.nodes = server, {}
        self.demo = self.add("SFGRPO_LoadShapesDemo")
        self.reward = self.add("SFGRPO_ShapesReward", mode="soft")()

    def add(self, kind, **inputs):
        """Add a node; returns a function from slot to link."""
        name = str(len(self.nodes) + 1)
        self.nodes[name] = {"class_type": kind, "inputs": inputs}
        return lambda slot=0: [name, slot]

    def encode(self, text):
        return self.add("CLIPTextEncode", clip=self.demo(1), text=text)()

    def preview(self, **changed):
        """Add the preview with the demo's model and CLIP; None leaves an input out. Returns its links."""
        links = {"model": self.demo(0), "clip": self.demo(1), "vae": self.demo(2), "reward": self.reward}
        inputs = links | SMALL | changed
        self.node = self.add("SFGRPO_TweediePreview", **{k: v for k, v in inputs.items() if v is not None})
        self.text = self.add("PreviewAny", source=self.node(3))()[0]
        return self.node

    def run(self):
        outcome = self.server.run(self.nodes)
        assert outcome.status == "success", outcome.error
        return outcome

    def data(self, outcome=None):
        """The numbers of the preview, after a run."""
        return json.loads((outcome or self.run()).outputs[self.text]["text"][0])


@pytest.fixture
def graph(server):
    return Graph(server)


def data_of(server, **changed):
    graph = Graph(server)
    graph.preview(**changed)
    return graph.data()


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("kernel, substeps, guidance", (("ddim", 1, 1.0), ("flow_grpo", 3, 3.0)))
def test_numbers_are_those_of_diffusers_models(graph, embedded, kernel, substeps, guidance):
    graph.reward = graph.add("SFGRPO_RewardMix", reward_1=graph.reward, weight_1=2.0)()
    graph.preview(kernel=kernel, substeps=substeps, guidance=guidance)
    data = graph.data()
    family = load_family(str(embedded.path), torch.float32, torch.device("cpu"), max_sequence_length=0)
    prompts = [Prompt(text) for text in TEXTS]
    policy = LoRAPolicy(
        family, encode_prompts(family, prompts, {0, 1}, guidance > 1), guidance=guidance, dtype=torch.float32
    )
    sigmas = family.sigmas(5, 32, 32)
    result = probe(
        policy,
        mix({"shapes": 2.0}),
        prompts,
        sigmas=sigmas,
        latent_shape=family.latent_shape(32, 32),
        kernel=Kernel(name=kernel, eta=0.7),
        members=2,
        substeps=substeps,
        seed=4,
    )
    assert data["sigmas"] == pytest.approx(sigmas.tolist(), abs=1e-6)
    assert data["stds"] == pytest.approx(result.trajectory.stds.tolist(), abs=1e-6)
    torch.testing.assert_close(tensor(data["rewards"]), result.rewards, rtol=0, atol=2e-3)
    torch.testing.assert_close(tensor(data["parts"]["shapes"]), result.parts["shapes"], rtol=0, atol=1e-3)
    assert float(result.rewards.std()) > 0.1


def test_the_numbers_hold_together(graph):
    graph.preview(trajectories=3, steps=6)
    data = graph.data()
    rewards, gains = tensor(data["rewards"]), tensor(data["gains"])
    assert rewards.shape == (2, 3, 7) and gains.shape == (2, 3, 6)
    torch.testing.assert_close(gains.sum(-1), rewards[..., -1] - rewards[..., 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(gains.cumsum(-1) + rewards[..., :1], rewards[..., 1:], rtol=0, atol=1e-6)
    assert (rewards[..., 0] == rewards[:, :1, 0]).all() and (rewards[..., 1:].std(1) > 0).any()
    assert data["mean_reward"] == pytest.approx(rewards.mean((0, 1)).tolist(), abs=1e-6)
    assert data["mean_gain"] == pytest.approx(gains.mean((0, 1)).tolist(), abs=1e-6)
    assert data["parts"] == {"shapes": data["rewards"]}
    assert data["prompts"] == TEXTS and data["trajectories"] == 3 and data["kernel"] == "ddim" and data["seed"] == 4


def test_last_rewards_are_the_scores_of_the_decoded_latent(graph):
    node = graph.preview(steps=8)
    images = graph.add("VAEDecode", samples=node(2), vae=graph.demo(2))()
    lines = "\n".join(text for text in TEXTS for _ in range(2))
    scored = graph.add("SFGRPO_ScoreImages", images=images, reward=graph.reward, prompts=lines)
    text = graph.add("PreviewAny", source=scored(2))()[0]
    outcome = graph.run()
    rewards = tensor(graph.data(outcome)["rewards"])[..., -1].flatten()
    rows = json.loads(outcome.outputs[text]["text"][0])["images"]
    torch.testing.assert_close(rewards, tensor([row["score"] for row in rows]), rtol=0, atol=1e-5)
    assert float(rewards.max()) > 0.3


@pytest.mark.parametrize("noise", ({"kernel": "ode"}, {"eta": 0.0}))
def test_without_noise_all_trajectories_are_equal(server, noise):
    data = data_of(server, trajectories=3, **noise)
    rewards = tensor(data["rewards"])
    assert (rewards == rewards[:, :1]).all() and rewards.std() > 0
    assert data["stds"] == [0.0] * 5


def test_the_seed_decides(server):
    # Other whitespace in the prompts makes ComfyUI compute it anew.
    first, again = data_of(server), data_of(server, prompts=f"{TEXTS[0]} \n\n{TEXTS[1]}\n")
    assert first == again
    assert data_of(server, seed=5)["rewards"] != first["rewards"]


def test_the_batch_does_not_matter(server):
    one, all_at_once = data_of(server, batch_size=1), data_of(server, batch_size=100)
    torch.testing.assert_close(tensor(one["rewards"]), tensor(all_at_once["rewards"]), rtol=0, atol=1e-3)


def test_ready_conditioning_and_sigmas_stand_for_clip_and_steps(graph):
    plain = data_of(graph.server, guidance=2.0)
    both = graph.add(
        "ConditioningCombine", conditioning_1=graph.encode(TEXTS[0]), conditioning_2=graph.encode(TEXTS[1])
    )
    sigmas = graph.add("SFGRPO_FlowSigmas", steps=5, family="sd3", shift=0.0, width=32, height=32, denoise=1.0)()
    graph.preview(clip=None, positive=both(), negative=graph.encode(""), guidance=2.0, steps=9, sigmas=sigmas)
    ready = graph.data()
    torch.testing.assert_close(tensor(ready["rewards"]), tensor(plain["rewards"]), rtol=0, atol=1e-5)
    graph.preview(clip=None, positive=both(), negative=graph.encode("four blue squares"), guidance=2.0)
    other = tensor(graph.data()["rewards"])
    assert (other - tensor(plain["rewards"])).abs().max() > 1e-3


def test_the_workflow_runs(server):
    outcome = server.run(json.loads(WORKFLOW.read_text()))
    assert outcome.status == "success", outcome.error
    assert len(outcome.outputs["7"]["images"]) == 12
    board, plot = (Image.open(server.output / outcome.outputs[n]["images"][0]["filename"]) for n in ("4", "5"))
    # Eleven columns and twelve rows of 128 pixels, and what stands around them.
    assert 11 * 128 < board.width < 11 * 128 + 150 and 12 * 128 < board.height < 12 * 200
    assert plot.width == 960
    shown = [Image.open(server.base / "temp" / image["filename"]).size for image in outcome.outputs["3"]["images"]]
    assert shown == [board.size, plot.size]
    data = json.loads(outcome.outputs["8"]["text"][0])
    gains = data["mean_gain"]
    assert 0.3 < data["mean_reward"][-1] < 0.8 and max(gains[2:7]) > 0.05 > max(gains[7:])


async def watch(server, nodes, cancel_at=None):
    """Queue a prompt with a socket open; Cancel when its preview node has done this share of its work.

    Returns (name of the last event, pictures shown, shares of the work that were told).
    """
    client, pictures, shares = uuid.uuid4().hex, [], []
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{server.url}/ws?clientId={client}", max_msg_size=0) as socket:
            await session.post(f"{server.url}/prompt", json={"prompt": nodes, "client_id": client})
            async for message in socket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    kind, form = struct.unpack(">II", message.data[:8])
                    if (kind, form) == (1, 1):
                        pictures.append(Image.open(BytesIO(message.data[8:])))
                    continue
                event = json.loads(message.data)
                if event["type"] == "progress":
                    shares.append(event["data"]["value"] / event["data"]["max"])
                    if cancel_at is not None and shares[-1] >= cancel_at:
                        await session.post(f"{server.url}/interrupt", json={})
                        cancel_at = None
                if event["type"] in ("execution_success", "execution_interrupted", "execution_error"):
                    return event["type"], pictures, shares
    raise AssertionError("the socket closed")


def test_it_shows_the_board_while_it_runs(graph):
    graph.preview(trajectories=4, batch_size=2, seed=9)
    event, pictures, shares = run_alone(watch(graph.server, graph.nodes))
    assert event == "execution_success" and pictures
    # ComfyUI sends only some of the steps of one that is quick.
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1 and len(set(shares)) > 2
    # The first one: a board as wide as the finished one, within the preview's size; mostly places yet to come.
    width, height = pictures[0].size
    assert pictures[0].format == "JPEG" and max(width, height) <= 1024 and min(width, height) > 200
    grey = sum(n for n, colour in pictures[0].convert("RGB").getcolors(1 << 24) if all(235 < c < 245 for c in colour))
    assert grey > 0.4 * width * height
    # The last one is what stays on the node: board and plot, whole.
    last = pictures[-1]
    assert last.width > 6 * 128 and last.height > 8 * 128 + 700 and max(last.size) > 1024


@pytest.mark.parametrize("share", (0.02, 0.45, 0.7), ids=("rollout", "estimates", "decoding"))
def test_cancel_stops_it_and_changes_nothing(graph, share):
    expected = data_of(graph.server, seed=21, kernel="flow_grpo")
    # 82 rows of the rollout, 73 of estimates, 91 decoded.
    graph.preview(prompts="two red circles", seed=22, trajectories=9, steps=10, substeps=2, batch_size=2)
    event, _, shares = run_alone(watch(graph.server, graph.nodes, share))
    assert event == "execution_interrupted" and share <= max(shares) < 1
    spaces = " " * round(100 * share)
    after = data_of(graph.server, seed=21, kernel="flow_grpo", prompts=f"{TEXTS[0]}{spaces}\n{TEXTS[1]}")
    assert after == expected


@pytest.mark.parametrize(
    "changed, words",
    (
        ({"prompts": " \n"}, "no prompt given; write one a line"),
        ({"prompts": "a red circle\na cat"}, "'a cat' is not a caption that the shapes verifier can check"),
        ({"width": 64}, "the shapes verifier reads 32 x 32 pictures, not 64 x 32"),
        ({"clip": None}, "connect a CLIP, or ready CONDITIONING in its place"),
        ({"eta": 1.5}, "eta of the ddim kernel must be 0 to 1, got 1.5"),
    ),
)
def test_mistakes_are_named_in_one_sentence(graph, changed, words):
    graph.preview(**changed)
    outcome = graph.server.run(graph.nodes)
    assert outcome.status == "error"
    assert outcome.error.startswith(words) and "\n" not in outcome.error


def test_conditioning_that_does_not_fit_is_named(graph):
    one = graph.encode("a red circle")
    graph.preview(clip=None, positive=one)
    words = "positive holds conditioning for 1 prompt, and prompts has 2; write those that were encoded, one a line"
    assert graph.server.run(graph.nodes).error.startswith(words)
    graph.preview(clip=None, positive=one, prompts="a red circle", guidance=2.0)
    del graph.nodes["4"], graph.nodes["5"]
    assert graph.server.run(graph.nodes).error.startswith("guidance above 1 needs a negative; connect negative or CLIP")


def test_sigmas_that_end_early_are_named(graph):
    sigmas = graph.add("SFGRPO_FlowSigmas", steps=6, family="sd3", shift=0.0, width=32, height=32, denoise=1.0)()
    high = graph.add("SplitSigmas", sigmas=sigmas, step=3)()
    graph.preview(sigmas=high)
    assert graph.server.run(graph.nodes).error.startswith("sigmas must start at 1 or below and end at exactly 0, got")


@pytest.mark.parametrize(
    "kind, options, words",
    (
        ("ModelSamplingDiscrete", {"sampling": "v_prediction", "zsnr": False}, "is not a flow-matching model; connect"),
        ("ModelNoiseScale", {"noise_scale": 3.0}, "starts from noise of 3 times the usual strength"),
    ),
)
def test_models_that_do_not_fit_are_named(graph, kind, options, words):
    if kind not in graph.server.get("/object_info"):
        pytest.skip(f"this ComfyUI has no {kind}")
    graph.preview(model=graph.add(kind, model=graph.demo(0), **options)())
    outcome = graph.server.run(graph.nodes)
    assert outcome.status == "error" and words in outcome.error and "\n" not in outcome.error
