"""Fixtures of the tests in the frontend: ComfyUI as a new user has it, and a headless Chromium.

Needs the Python package playwright, a `chromium` in the path and a ComfyUI checkout; all tests here are skipped where
one of them is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.browser.frontend import TEMPLATES, Frontend, models
from tests.comfyui import Server, comfyui

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


@pytest.fixture(scope="module")
def server(browser, server) -> Iterator[Server]:
    """The ComfyUI; its user has seen the welcome, and each model of a template is there as an empty file."""
    files = {server.base / "models" / m["directory"] / m["name"] for name in TEMPLATES for m in models(name)}
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    server.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": False})
    yield server
    for file in files:
        file.unlink()


@pytest.fixture(scope="module")
def frontend(browser, server) -> Iterator[Frontend]:
    """The page in which most tests work, one after the other."""
    page = browser.new_page(viewport=VIEW)
    yield Frontend(page, server)
    page.close()


@pytest.fixture(autouse=True)
def no_errors(request) -> Iterator[None]:
    """After each test: the page wrote no error."""
    yield
    if "frontend" in request.fixturenames:
        page = request.getfixturevalue("frontend")
        errors, page.errors = page.errors, []
        assert not errors, "\n".join(errors)
