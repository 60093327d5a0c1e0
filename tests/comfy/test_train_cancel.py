"""A training that is cancelled or fails: nothing of it stays on the MODEL, and what was learned is in a file."""

import re
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfy.training import Graph

SLOW = {
    "prompts_per_iteration": 1,
    "substeps": 3,
    "rollout_batch": 1,
    "update_batch": 1,
    "decode_batch": 1,
    "gradient_checkpointing": True,
}
"""Every phase is many calls, so that a Cancel that comes in a phase ends it there."""

REST = {"left": [], "requires_grad": [], "injections": [], "patches": 0, "in_training": False, "inference_mode": True}
"""What Probe_Look says of a model that nobody works on."""


@dataclass
class Before:
    """What there is before anything is stopped."""

    look: dict
    picture: torch.Tensor
    lora: dict
    """Of a quick training to its end."""
    first: dict
    """Of a SLOW training that ends after its first iteration."""


def check_graph(server, at_rest: bool = False) -> Graph:
    """Look at the model, then draw with it and train it quickly."""
    graph = Graph(server)
    model = graph.add("slow saves", "Probe_SlowSaves", model=graph.model, seconds=0.0)
    model = graph.look(model, at_rest=at_rest)
    graph.draw("picture", model)
    graph.train(model=model, iterations=1, eval_every=100, eval_prompts=1, name="quick")
    return graph


@pytest.fixture(scope="module")
def before(server) -> Before:
    graph = Graph(server)
    graph.train(**SLOW, iterations=1, eval_prompts=1, name="one")
    first = graph.run().lora()
    result = check_graph(server).run()
    assert {key: result.look()[key] for key in REST} == REST
    return Before(result.look(), result.latent("picture"), result.lora(), first)


def check_after(server, before: Before, at_rest: bool = False) -> None:
    """The MODEL, its pictures and the next training are as they were."""
    result = check_graph(server, at_rest).run()
    assert result.look() == before.look
    assert torch.equal(result.latent("picture"), before.picture)
    lora = result.lora()
    assert lora.keys() == before.lora.keys()
    assert all(torch.equal(lora[name], before.lora[name]) for name in lora)


@dataclass
class Cancel:
    """Presses Cancel when a text is shown, and again at a second one."""

    server: object
    at: list[str]
    texts: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if self.at and re.search(self.at[0], text):
            self.at.pop(0)
            self.server.interrupt()


MANY = {"prompts": "\n".join(f"{n} circles" for n in range(400)), "eval_prompts": 400}

MOMENTS = {
    "encoding": (["^encoding prompts: 20 "], "encoding prompts"),
    "before the first sample": (["^samples after iteration 0: 0 of"], "samples after iteration 0: 0"),
    "in the first samples": (["^samples after iteration 0: 1 of"], "samples after iteration 0: 1"),
    "rollout": (["^iteration 1 of 2: sample 25%"], "iteration 1 of 2: sample"),
    "estimate": (["^iteration 1 of 2: estimate"], "iteration 1 of 2: estimate"),
    "score": (["^iteration 1 of 2: score"], "iteration 1 of 2: score"),
    "early backward": (["^iteration 1 of 2: update"], "iteration 1 of 2: update"),
    "late backward": (["^iteration 1 of 2: update [67]"], "iteration 1 of 2: update"),
    "second samples": (["^samples after iteration 1: 0 of"], "samples after iteration 1"),
    "second rollout": (["^iteration 2 of 2: sample"], "iteration 2 of 2: sample"),
    "second score": (["^iteration 2 of 2: score"], "iteration 2 of 2: score"),
    "second backward": (["^iteration 2 of 2: update [345]"], "iteration 2 of 2: update"),
    "saving": (["^saving"], "saving"),
}
"""Name of a moment -> (texts at which Cancel is pressed, what is shown last before the stop)."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_cancel(server, before, moment):
    at, last = MOMENTS[moment]
    name = f"cancel {moment}"
    graph = Graph(server)
    slow = graph.add("slow saves", "Probe_SlowSaves", model=graph.model, seconds=0.3 if "saving" in moment else 0.0)
    graph.train(model=slow, **SLOW | (MANY if moment == "encoding" else {}), name=name)
    cancel = Cancel(server, list(at))
    outcome = server.watch(graph.nodes, cancel)
    assert outcome.status == "interrupted"
    assert not cancel.at
    *shown, end = cancel.texts if moment != "encoding" else [*cancel.texts, ""]
    assert shown[-1].startswith(last)

    file = server.output / "loras" / f"{name}_00001_last.safetensors"
    one_done = any("iteration 2 of 2" in text or "after iteration 1" in text for text in cancel.texts)
    if one_done or "saving" in moment:
        assert end == f"stopped; the LoRA of iteration 1 is in output/loras/{file.name}"
        lora = load_file(file)
        assert lora.keys() == before.first.keys()
        assert all(torch.equal(lora[key], before.first[key]) for key in lora)
    else:
        assert end in ("", "stopped before the first iteration was done; there is no LoRA yet")
        assert not list(file.parent.glob(f"{name}*"))
    assert not list(server.output.rglob("*.part"))
    check_after(server, before)


@pytest.mark.parametrize("adapter", ("hook", "weight"))
def test_cancel_of_a_model_with_a_lora(server, before, adapter):
    """A LoRA that was on the MODEL before is there as it was, and the base model below it too."""
    save_file(before.first, server.base / "models" / "loras" / "below.safetensors")

    def draw():
        graph = Graph(server)
        on = {"lora_name": "below.safetensors", "strength_model": 1.0}
        model = graph.add("lora", "LoraLoaderModelOnly", model=graph.model, **on)
        graph.draw("picture", model)
        return graph, model, graph.run().latent("picture")

    graph, model, picture = draw()
    del graph.nodes["picture"]
    graph.train(**SLOW, model=model, adapter=adapter, name=f"cancel on a lora {adapter}")
    cancel = Cancel(server, ["^iteration 1 of 2: update [345]"])
    assert server.watch(graph.nodes, cancel).status == "interrupted"
    assert torch.equal(draw()[2], picture)
    check_after(server, before, at_rest=True)


def fails(graph: Graph, kind: str, at: int) -> str:
    """The graph with a part of a kind that fails at its call number `at`; returns the words with which it does."""
    if kind == "reward":
        graph.train(**QUICK, reward=graph.reward(fail_at=at))
        return "this reward is broken"
    if kind == "vae":
        graph.train(**QUICK, vae=graph.add("broken", "Probe_FailingVAE", vae=graph.vae, fail_at=at))
        return "this VAE is broken"
    graph.train(**QUICK, model=graph.add("broken", "Probe_FailInBackward", model=graph.model, fail_at=at))
    return "CUDA out of memory. Tried to allocate 2.00 GiB."


QUICK = {"name": "failed", "decode_batch": 64, "rollout_batch": 64, "eval_prompts": 1}


@pytest.mark.parametrize(
    ("kind", "at", "learned"),
    (
        # Two prompts are checked; then come the first samples, a rollout, samples, and the second rollout.
        ("reward", 4, False),
        ("reward", 6, True),
        ("vae", 1, False),
        ("vae", 4, True),
        # Four backward passes an iteration.
        ("backward", 2, False),
        ("backward", 6, True),
    ),
)
def test_error(server, before, kind, at, learned):
    saved = set((server.output / "loras").glob("failed_*"))
    graph = Graph(server)
    words, shown = fails(graph, kind, at), []
    outcome = server.watch(graph.nodes, shown.append)
    assert outcome.status == "error" and outcome.error.startswith(words)
    saved_at = "stopped; the LoRA of iteration 1 is in output/loras/failed_"
    assert shown[-1].startswith(
        saved_at if learned else "stopped before the first iteration was done; there is no LoRA yet"
    )
    new = set((server.output / "loras").glob("failed_*")) - saved
    # The best so far is saved too where it is better than the start.
    kinds = {file.name.split("_")[-1] for file in new} - {"best.safetensors"}
    assert kinds == ({"last.safetensors"} if learned else set())
    for file in new:
        assert all(value.isfinite().all() for value in load_file(file).values())
    check_after(server, before)


def test_another_rank_after_an_error(server, before):
    """Nothing of the failed training's shapes is left anywhere."""
    graph = Graph(server)
    fails(graph, "backward", 1)
    graph.error()
    graph = Graph(server)
    graph.train(rank=2, layers="all", adapter="weight", iterations=1)
    graph.run()
    check_after(server, before)
