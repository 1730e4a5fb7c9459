"""What `tessera map` and `tessera codesign` map: a model from a file, with arguments.

In: what the command line names. Out: the model, its arguments by position and by name. An artifact says the types of
its arguments, and random ones of these types do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.artifact.loaded import load
from tessera.artifact.structure import unflatten
from tessera.tools.convert import SOURCES
from tessera.tools.run_artifact import random_leaves
from tessera.util.errors import OptionError

ARTIFACT = ".tess"
HELP = "model.pt2, model.onnx, model.tess, or script.py:function, which gives model and arguments"


def read(source: str) -> tuple[Any, tuple, dict]:
    kind = Path(source.partition(":")[0]).suffix
    if kind == ARTIFACT:
        return _artifact(source)
    if kind not in SOURCES:
        raise OptionError(f"expected a source that ends in {' or '.join([*SOURCES, ARTIFACT])}, got {source!r}")
    model, example, _ = SOURCES[kind](source, {})
    return model, example, {}


def _artifact(source: str) -> tuple[Any, tuple, dict]:
    file = load(source, device="cpu")
    if len(file.entries) > 1:
        raise OptionError(f"{source}: expected an artifact of one entry, got {', '.join(file.entries)}")
    (entry,) = file.entries.values()
    args, kwargs = unflatten(iter(random_leaves(entry, {})), entry.arguments.structure)  # type: ignore[misc]
    return file, args, kwargs
