"""Every script in examples/ runs to its end, at a small size."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pages import ROOT, apart, run_script

# What a script is called with, where it would take long otherwise.
ARGUMENTS: dict[str, list[str]] = {
    "train_gpt.py": ["5"],
    "demo.py": ["--steps", "3", "--peer", "aot_eager"],
    "llama_on_64_chips.py": ["2", "1"],
}
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    if script.name == "generate.py" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    assert apart(tmp_path, run_script, str(script), ARGUMENTS.get(script.name, [])).strip()
