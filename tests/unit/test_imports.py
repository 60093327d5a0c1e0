"""The core imports torch and nothing else that a ComfyUI environment might lack."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = ("diffusers", "transformers", "peft", "accelerate", "safetensors", "scipy", "PIL", "matplotlib", "pydantic")


def loaded_by(code: str) -> set[str]:
    """Top-level modules that `code` loads beyond those of `import torch`."""
    script = f"import sys, torch; before = set(sys.modules); {code}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_every_module_of_the_core_loads_nothing_heavy():
    files = [p.relative_to(ROOT).with_suffix("") for p in sorted((ROOT / "sfgrpo").rglob("*.py"))]
    names = [".".join(f.parts).removesuffix(".__init__") for f in files]
    assert "sfgrpo.loop" in names and "sfgrpo.rewards.shapes" in names
    loaded = loaded_by("import " + ", ".join(names))
    assert "sfgrpo" in loaded
    assert not loaded & set(HEAVY)


def test_importing_the_package_loads_itself_alone():
    assert loaded_by("import sfgrpo") == {"sfgrpo"}


def test_the_installed_names_clash_with_nothing(tmp_path):
    code = "from importlib.util import find_spec as f; print(*(f(n) is not None for n in %r))"
    names = ("sfgrpo", "sfgrpo_trainer", "nodes", "trainer", "benchmarks")
    done = subprocess.run(
        [sys.executable, "-c", code % (names,)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "False", "False", "False"]
