"""The templates in ComfyUI's frontend: they open as they are meant to look, and those for a CPU run."""

from __future__ import annotations

import json
import re
import urllib.request
from itertools import combinations

import pytest
from PIL import Image, ImageChops
from safetensors.torch import load_file

from tests.browser.frontend import TEMPLATES, models, workflow
from tests.comfyui import PACK, ROOT

ON_A_CPU = ["reward_preview", "sampler_comparison", "train_shapes_demo", "use_trained_lora"]
ALIKE = ["sampler_comparison", "train_shapes_demo", "use_trained_lora"]
"""Templates with an API form that is the same prompt."""
OURS = "SFGRPO_"
QUICK = {
    "iterations": 2,
    "prompts_per_iteration": 2,
    "group_size": 4,
    "eval_every": 1,
    "eval_prompts": 4,
    "eval_images": 1,
}
"""Settings of a training of seconds."""
TRAIN, LOAD_LORA = 5, 6
"""Ids of nodes in the templates."""


def overlaps(nodes: list[dict]) -> list[tuple[str, str]]:
    """Titles of nodes that lie on each other."""

    def meet(a: list, b: list, side: int) -> bool:
        return a[side] < b[side] + b[side + 2] and b[side] < a[side] + a[side + 2]

    pairs = combinations(nodes, 2)
    return [(a["title"], b["title"]) for a, b in pairs if all(meet(a["box"], b["box"], side) for side in (0, 1))]


def read(server, path: str) -> tuple[int, str, bytes]:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=60) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read()


def test_there_are_templates():
    assert set(TEMPLATES) == {*ON_A_CPU, "train_sd35_medium", "train_z_image_turbo", "train_flux2_klein"}


def test_offered_with_thumbnails(server):
    offered = server.get("/workflow_templates")
    assert sorted(offered[PACK]) == TEMPLATES
    for name in TEMPLATES:
        status, kind, _ = read(server, f"/api/workflow_templates/{PACK}/{name}.jpg")
        assert (status, kind) == (200, "image/jpeg")
        with Image.open(ROOT / "workflows" / f"{name}.jpg") as picture:
            assert picture.size == (400, 400)


def test_each_node_has_help(server):
    ours = [kind for kind in server.get("/object_info") if kind.startswith(OURS)]
    assert len(ours) >= 9
    for kind in ours:
        status, _, text = read(server, f"/extensions/{PACK}/docs/{kind}.md")
        assert status == 200 and text.startswith(b"# ")


def test_picker(frontend):
    """All templates are in the picker with their thumbnails, and a click opens one."""
    frontend.pick("reward_preview")
    saved = {node["id"]: node["type"] for node in workflow("reward_preview")["nodes"]}
    assert {node["id"]: node["type"] for node in frontend.nodes()} == saved
    assert not frontend.complaint()


@pytest.mark.parametrize("name", TEMPLATES)
def test_opens(frontend, server, name):
    """It looks as it is meant to, and is what its API form says or at least a prompt that ComfyUI takes."""
    frontend.open(name)
    names = {kind: info["display_name"] for kind, info in server.get("/object_info").items() if kind.startswith(OURS)}
    nodes = frontend.nodes()
    assert all(node["known"] and not node["marked"] for node in nodes)
    assert all(node["title"] == names[node["type"]] for node in nodes if node["type"] in names)
    assert any(node["type"] in names for node in nodes)
    assert not overlaps(nodes)
    small = [n["title"] for n in nodes if n["size"][0] < n["least"][0] - 1 or n["size"][1] < n["least"][1] - 1]
    assert not small
    assert not frontend.complaint()
    if name in ALIKE:
        # What the template queues, with the LoRA switched on in that which uses one.
        frontend.page.evaluate("() => { for (const node of window.app.rootGraph.nodes) node.mode = 0; }")
        assert frontend.prompt() == json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text())
    if name not in ON_A_CPU:
        fails_at_its_first_model(frontend, server, name)


def fails_at_its_first_model(frontend, server, name) -> None:
    """ComfyUI takes the prompt as valid, and then fails at the first model, for the file here is empty."""
    wanted = models(name)
    values = [value for node in workflow(name)["nodes"] for value in node.get("widgets_values", [])]
    assert wanted and all(m["name"] in values and m["url"].endswith("/" + m["name"]) for m in wanted)
    outcome = server.run(frontend.prompt())
    (failed,) = (data for kind, data in outcome.messages if kind == "execution_error")
    assert failed["node_type"] in ("CheckpointLoaderSimple", "UNETLoader", "CLIPLoader", "VAELoader")


def test_no_overlap_in_nodes_2(frontend):
    """Nodes 2.0 draws nodes larger than the older canvas, at the same places."""
    frontend.setting("Comfy.VueNodes.Enabled", True)
    try:
        for name in TEMPLATES:
            frontend.open(name)
            assert (name, overlaps(frontend.nodes())) == (name, [])
    finally:
        frontend.setting("Comfy.VueNodes.Enabled", False)


def test_missing_model_is_offered(frontend, server):
    """Without the file the frontend says which one is missing. (With it, test_opens, it says nothing.)"""
    (model,) = models("train_sd35_medium")
    file = server.base / "models" / model["directory"] / model["name"]
    file.unlink()
    try:
        frontend.load()
        frontend.open("train_sd35_medium")
        assert model["name"] in frontend.complaint(wait=True)
    finally:
        file.touch()
        frontend.load()
    # The page may not ask the other site for the size of the file: ComfyUI's own rule without its API nodes.
    assert all(model["url"] in error for error in frontend.errors)
    frontend.errors.clear()


def shows_images(frontend, *titles: str) -> None:
    """Each of these nodes has pictures, and they are on the canvas."""
    frontend.settle(lambda: all(frontend.node("PreviewImage", title)["drawn"] for title in titles))
    for title in titles:
        node = frontend.node("PreviewImage", title)
        assert node["images"] and all(width >= 64 and height >= 64 for width, height in node["drawn"])


def test_sampler_comparison_runs(frontend):
    frontend.open("sampler_comparison")
    assert frontend.run()[0] == "execution_success"
    shows_images(frontend, "ode", "ddim", "flow_grpo")
    scores = [n["text"] for n in frontend.nodes() if n["type"] == "SFGRPO_ScoreImages"]
    assert len(scores) == 3 and all(text.startswith("mean 0.") and "8 images" in text for text in scores)
    pictures = [frontend.image("PreviewImage", title) for title in ("ode", "ddim", "flow_grpo")]
    assert all(ImageChops.difference(a, b).getbbox() for a, b in combinations(pictures, 2))


def test_reward_preview_runs(frontend):
    frontend.open("reward_preview")
    assert frontend.run()[0] == "execution_success"
    shows_images(frontend, "Estimates", "Reward by step", "Finished pictures")
    assert len(frontend.node("PreviewImage", "Finished pictures")["images"]) == 6
    numbers = json.loads(frontend.widget(8, "preview_text"))
    assert len(numbers["mean_reward"]) == 11


@pytest.fixture(scope="module")
def lora(frontend, server):
    """The LoRA of the training template, after two rounds."""
    frontend.open("train_shapes_demo")
    frontend.set(TRAIN, **QUICK)
    assert frontend.run()[0] == "execution_success"
    return server.output / "loras" / "shapes_00001_last.safetensors"


def test_training_runs(frontend, server, lora):
    shows_images(frontend, "Reward", "Before and after")
    node = frontend.node("SFGRPO_TrainLoRA")
    assert node["text"].startswith("reward of the samples: ") and lora.name in node["text"]
    # The node itself keeps its result in view too, and not the last samples.
    with Image.open(server.base / "temp" / node["images"][0]) as pairs:
        assert node["drawn"] == [list(pairs.size)]
    by_core = load_file(server.output / "loras" / "shapes_trained_30_steps_00001_.safetensors")
    assert by_core.keys() == load_file(lora).keys()


def test_use_trained_lora(frontend, lora):
    """As the note says: it runs as it is; then R, the file, Ctrl+B, Run."""
    frontend.open("use_trained_lora")
    assert frontend.run()[0] == "execution_success"
    shows_images(frontend, "Without", "With")
    scores = [n["text"] for n in frontend.nodes() if n["type"] == "SFGRPO_ScoreImages"]
    assert len(scores) == 2 and scores[0] == scores[1] and scores[0].startswith("mean ")
    assert frontend.image("PreviewImage", "Without").tobytes() == frontend.image("PreviewImage", "With").tobytes()

    frontend.press("r")
    frontend.settle(lambda: lora.name in frontend.widget(LOAD_LORA, "lora_name", "options")["values"])
    frontend.set(LOAD_LORA, lora_name=lora.name)
    frontend.select(LOAD_LORA)
    frontend.press("Control+b")
    assert frontend.run()[0] == "execution_success"
    without, with_lora = (frontend.image("PreviewImage", title) for title in ("Without", "With"))
    assert ImageChops.difference(without, with_lora).getbbox()


@pytest.mark.slow
def test_training_raises_the_reward(frontend):
    """The training template as it is."""
    frontend.open("train_shapes_demo")
    assert frontend.run()[0] == "execution_success"
    before, after = frontend.node("SFGRPO_TrainLoRA")["text"].split(":")[1].split(" in ")[0].split("->")
    assert float(after) > float(before) + 0.05


def test_cancel(frontend, server):
    frontend.open("train_shapes_demo")
    frontend.set(TRAIN, **QUICK | {"iterations": 50, "name": "stopped"})
    frontend.press_run()
    frontend.settle(lambda: frontend.node("SFGRPO_TrainLoRA")["text"].startswith("iteration 2 "))
    frontend.page.get_by_role("button", name="Cancel current run").first.click()
    kind, details = frontend.wait_for_end()
    assert kind == "execution_interrupted" and details["node_type"] == "SFGRPO_TrainLoRA"
    words = r"stopped; the LoRA of iteration \d+ is in output/loras/stopped_00001_last.safetensors"
    frontend.settle(lambda: re.fullmatch(words, frontend.node("SFGRPO_TrainLoRA")["text"]))
    assert (server.output / "loras" / "stopped_00001_last.safetensors").is_file()
    frontend.set(TRAIN, **QUICK | {"iterations": 1, "name": "after"})
    assert frontend.run()[0] == "execution_success"


def test_wrong_inputs_are_told(frontend):
    frontend.open("train_shapes_demo")
    frontend.set(TRAIN, **QUICK | {"group_size": 1})
    assert frontend.run()[0] == "refused"
    assert "group_size is below the minimum 2" in frontend.complaint(wait=True)
    # ComfyUI refused the prompt, which is an error of the page too.
    assert all("400 (Bad Request)" in error or "PromptExecutionError" in error for error in frontend.errors)
    frontend.errors.clear()
    frontend.set(TRAIN, **QUICK | {"prompts": " \n"})
    kind, details = frontend.run()
    assert kind == "execution_error"
    assert details["exception_message"].strip() == "write at least one prompt, one a line, or choose a prompt_file"


def test_help_button(frontend):
    frontend.open("train_shapes_demo")
    frontend.select(TRAIN)
    frontend.page.get_by_role("button", name="Node Info").click()
    frontend.page.get_by_role("heading", name="How to use it").wait_for()
    # The frontend asks for a page in the user's language first.
    absent = [error for error in frontend.errors if "/docs/SFGRPO_TrainLoRA/en.md" in error]
    frontend.errors = [error for error in frontend.errors if error not in absent]
    assert len(absent) <= 1
