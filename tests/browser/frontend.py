"""ComfyUI's frontend in a headless Chromium, as a user has it before them."""

from __future__ import annotations

import io
import json
import time
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from PIL import Image

from tests.comfyui import PACK, ROOT, Server

TEMPLATES = sorted(file.stem for file in (ROOT / "workflows").glob("*.json"))
WAIT = 300
"""Seconds to wait for what the frontend or ComfyUI does."""

NOT_THERE = "Failed to load resource: the server responded with a status of 404 (Not Found)"
STOCK_ERRORS = {
    (NOT_THERE, "/api/userdata/user.css"): "a user's own style, which a new user has not",
    (NOT_THERE, "/user.css"): "the same at its older place",
    (NOT_THERE, "/api/userdata"): "folders of saved workflows and subgraphs, which a new user has not",
    (NOT_THERE, "/api/userdata/comfy.templates.json"): "node templates of older frontends, which a new user has not",
    ("ComfyApp graph accessed before initialization", "/assets"): "the frontend's own code at its start",
    (NOT_THERE, "/templates/index.json"): "ComfyUI's own templates, where their large package is not installed",
    (NOT_THERE, "/templates/index_logo.json"): "the same",
    ("Error loading core workflow templates: AxiosError: Request failed with status code 404", "/assets"): "the same",
}
"""(first line, path of the address) of what stock ComfyUI writes as an error when it starts -> why."""

EVENTS = ("execution_start", "execution_success", "execution_error", "execution_interrupted", "executed")
LISTEN = """events => {
    window.heard = [];
    for (const kind of events) window.app.api.addEventListener(kind, e => window.heard.push([kind, e.detail]));
}"""
NODES = """() => window.app.rootGraph.nodes.map(n => ({
    id: Number(n.id),
    type: n.type,
    title: n.title,
    known: n.type in LiteGraph.registered_node_types,
    marked: Boolean(n.has_errors),
    box: [...n.boundingRect],
    least: [...n.computeSize()],
    size: [...n.size],
    text: n.widgets?.find(w => w.name === '$$node-text-preview')?.value ?? '',
    images: (window.app.nodeOutputs[String(n.id)]?.images ?? []).map(i => i.filename),
    drawn: (n.imgs ?? []).map(i => [i.naturalWidth, i.naturalHeight]),
}))"""


def workflow(name: str) -> dict:
    """A template's file."""
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text())


def models(name: str) -> list[dict]:
    """Files of models that a template names for download: name, url and directory of each."""
    return [model for node in workflow(name)["nodes"] for model in node["properties"].get("models", [])]


class Frontend:
    """One page with the frontend in it."""

    def __init__(self, page, server: Server) -> None:
        self.page, self.server = page, server
        self.errors: list[str] = []
        """What the page wrote as an error, without STOCK_ERRORS."""
        self.refused = False
        """Whether ComfyUI refused what was queued last."""
        page.set_default_timeout(1000 * WAIT)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("response", self._on_response)
        self.load()

    def _on_console(self, message) -> None:
        path = urlsplit(message.location.get("url", "")).path
        place = "/assets" if path.startswith("/assets/") else path
        if message.type == "error" and (message.text.split("\n")[0], place) not in STOCK_ERRORS:
            self.errors.append(f"{message.text} ({path})")

    def _on_response(self, response) -> None:
        self.refused |= urlsplit(response.url).path == "/api/prompt" and response.status == 400

    def load(self) -> None:
        """Load the page."""
        self.page.goto(self.server.url)
        # The frontend opens the workflow of the last time after all else.
        self.page.wait_for_function("() => window.app?.extensionManager?.workflow?.activeWorkflow?.isLoaded")
        self.page.evaluate(LISTEN, EVENTS)

    def setting(self, name: str, value) -> None:
        self.page.evaluate("([n, v]) => window.app.extensionManager.setting.set(n, v)", [name, value])

    def pick(self, template: str) -> None:
        """Open a template as a user does: Templates, this pack, its card."""
        self.page.get_by_role("button", name="Templates", exact=True).click()
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_text(PACK, exact=True).first.click()
        for name in TEMPLATES:
            dialog.get_by_text(name, exact=True).wait_for()
        self.page.wait_for_function(
            "n => [...document.querySelectorAll('[role=dialog] img')].filter(i => i.naturalWidth === 400).length === n",
            arg=len(TEMPLATES),
        )
        dialog.get_by_text(template, exact=True).click()
        dialog.wait_for(state="hidden")
        self.settle()

    def open(self, template: str) -> None:
        """Open a template without the picker."""
        self.page.evaluate("data => window.app.loadGraphData(data)", workflow(template))
        self.settle()

    def settle(self, condition: Callable[[], object] | None = None, seconds: float = WAIT) -> None:
        """Wait until a condition holds, or without one until the nodes have kept their places for half a second."""
        end, places, since = time.monotonic() + seconds, None, time.monotonic()
        while time.monotonic() < end:
            if condition is not None:
                if condition():
                    return
            else:
                now = [node["box"] for node in self.nodes()]
                if now != places:
                    places, since = now, time.monotonic()
                elif time.monotonic() - since > 0.5:
                    return
            self.page.wait_for_timeout(100)
        raise TimeoutError(f"the frontend did not come to rest in {seconds} s")

    def complaint(self, wait: bool = False) -> str:
        """What the frontend says is wrong with the workflow; empty where it says nothing (and is not waited for)."""
        overlay = self.page.get_by_test_id("error-overlay")
        if wait:
            overlay.first.wait_for()
        else:
            self.settle()
        return overlay.first.inner_text() if overlay.count() else ""

    def nodes(self) -> list[dict]:
        """What the page knows of each node; see NODES."""
        return self.page.evaluate(NODES)

    def node(self, kind: str, title: str | None = None) -> dict:
        """The only node of a kind, or that with a title."""
        (found,) = (n for n in self.nodes() if n["type"] == kind and title in (None, n["title"]))
        return found

    def set(self, node: int, **values) -> None:
        """Set widgets of a node."""
        self.page.evaluate(
            """([id, values]) => {
                const node = window.app.rootGraph.getNodeById(id);
                for (const [name, value] of Object.entries(values)) {
                    const widget = node.widgets.find(w => w.name === name);
                    if (!widget) throw new Error(`no widget ${name}`);
                    widget.value = value;
                }
            }""",
            [node, values],
        )

    def widget(self, node: int, name: str, of: str = "value"):
        """Value, or another property, of a widget."""
        return self.page.evaluate(
            "([id, name, of]) => window.app.rootGraph.getNodeById(id).widgets.find(w => w.name === name)[of]",
            [node, name, of],
        )

    def select(self, node: int) -> None:
        """Select a node."""
        self.page.evaluate("id => window.app.canvas.selectNode(window.app.rootGraph.getNodeById(id))", node)

    def press(self, keys: str) -> None:
        """Press keys with the focus on the canvas."""
        self.page.evaluate("() => { document.activeElement?.blur(); window.app.canvas.canvas.focus(); }")
        self.page.keyboard.press(keys)

    def prompt(self) -> dict:
        """The API prompt of the open workflow, as the frontend would queue it."""
        return self.page.evaluate("async () => (await window.app.graphToPrompt()).output")

    def press_run(self) -> None:
        """Press Run, and no more."""
        self.refused = False
        self.page.evaluate("() => { window.heard.length = 0; }")
        self.page.get_by_role("button", name="Run", exact=True).first.click()

    def wait_for_end(self) -> tuple[str, dict]:
        """Wait until what was queued has ended: (kind of the event, its details), or (refused, {}) by ComfyUI."""
        ended = "() => window.heard.find(h => /_(success|error|interrupted)$/.test(h[0]))"
        self.settle(lambda: self.refused or self.page.evaluate(ended), seconds=10 * WAIT)
        return ("refused", {}) if self.refused else tuple(self.page.evaluate(ended))

    def run(self) -> tuple[str, dict]:
        """Press Run and wait for the end."""
        self.press_run()
        return self.wait_for_end()

    def image(self, kind: str, title: str) -> Image.Image:
        """The pictures that a node shows, side by side, as the server has them."""
        pictures = []
        for name in self.node(kind, title)["images"]:
            with urllib.request.urlopen(f"{self.server.url}/view?type=temp&filename={name}", timeout=60) as answer:
                pictures.append(Image.open(io.BytesIO(answer.read())).convert("RGB"))
        row = Image.new("RGB", (sum(p.width for p in pictures), pictures[0].height))
        for i, picture in enumerate(pictures):
            row.paste(picture, (i * picture.width, 0))
        return row
