"""Tessera: a source-to-source deep-learning compiler for PyTorch.

`import tessera` alone loads nothing: a public name is looked up, and what it needs is imported, when it is first used.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING

from tessera.util.version import VERSION

if TYPE_CHECKING:
    from tessera import onnx as onnx
    from tessera import ops as ops
    from tessera import optim as optim
    from tessera import stablehlo as stablehlo
    from tessera.api import *  # noqa: F403
    from tessera.artifact.loaded import load as load
    from tessera.artifact.write import export as export
    from tessera.artifact.write import to_exported as to_exported
    from tessera.machines.find import machine as machine
    from tessera.serve.engine import Engine as Engine
    from tessera.serve.sampling import Sampling as Sampling
    from tessera.spatial.codesign.api import codesign as codesign
    from tessera.spatial.map import map_onto as map_onto
    from tessera.spatial.simulator.api import simulate as simulate
    from tessera.stablehlo.jax import from_jax as from_jax
    from tessera.tools.profile import profile as profile
    from tessera.tools.report import report as report

__version__ = VERSION
_PACKAGES = ("ops", "optim", "stablehlo")
_EXTRAS = ("onnx",)  # packages that need one of their own, so that `import *` leaves them alone
_TOOLS = {
    "Engine": "tessera.serve.engine",
    "Sampling": "tessera.serve.sampling",
    "codesign": "tessera.spatial.codesign.api",
    "export": "tessera.artifact.write",
    "from_jax": "tessera.stablehlo.jax",
    "load": "tessera.artifact.loaded",  # needs neither the compiler nor what it stands on
    "machine": "tessera.machines.find",
    "map_onto": "tessera.spatial.map",
    "profile": "tessera.tools.profile",
    "report": "tessera.tools.report",
    "simulate": "tessera.spatial.simulator.api",
    "to_exported": "tessera.artifact.write",
}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return ["__version__", *_PACKAGES, *_TOOLS, *_imported("tessera.api").__all__]
    if name.startswith("_"):
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    if name in _PACKAGES or name in _EXTRAS:
        return _imported(f"tessera.{name}")
    home = _imported(_TOOLS.get(name, "tessera.api"))
    if name not in _TOOLS and name not in home.__all__:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    public = globals()[name] = getattr(home, name)
    return public


def _imported(module: str) -> types.ModuleType:
    """What is imported stays, so nobody looks for garbage among it meanwhile: that took a tenth of the time."""
    with importlib.import_module("tessera.util.garbage").collection_paused():
        return importlib.import_module(module)


def __dir__() -> list[str]:
    return sorted([*globals(), *__getattr__("__all__")])  # type: ignore[misc]
