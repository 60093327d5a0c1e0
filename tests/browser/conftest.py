"""Fixtures of the tests in the frontend: a ComfyUI of their own, and a headless Chromium.

Needs the Python package playwright, a `chromium` in the path and a ComfyUI checkout; all tests here are skipped where
one of them is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.browser.frontend import TEMPLATES, Frontend, models
from tests.comfyui import Server, comfyui, start, stop

VIEW = {"width": 1600, "height": 1000}


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """A headless Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright (pip install playwright)")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium in the path")
    comfyui()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory) -> Iterator[Server]:
    """A ComfyUI whose user has seen the welcome, with an empty file under the name of each model of a template."""
    base = tmp_path_factory.mktemp("browser")
    for file in {model["directory"] + "/" + model["name"] for name in TEMPLATES for model in models(name)}:
        (base / "models" / file).parent.mkdir(parents=True, exist_ok=True)
        (base / "models" / file).touch()
    server = start(base)
    server.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": False})
    yield server
    stop(server)


@pytest.fixture(scope="session")
def frontend(browser, server) -> Frontend:
    """The page in which most tests work, one after the other."""
    return Frontend(browser.new_page(viewport=VIEW), server)


@pytest.fixture(autouse=True)
def no_errors(request) -> Iterator[None]:
    """After each test: the page wrote no error."""
    yield
    if "frontend" in request.fixturenames:
        page = request.getfixturevalue("frontend")
        errors, page.errors = page.errors, []
        assert not errors, "\n".join(errors)
