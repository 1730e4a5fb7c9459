"""Imported by the server whose forks are ranks: what each would import and compile first is there already."""

from __future__ import annotations

import gc

gc.disable()  # as conftest.py does, and for its reasons

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

import tessera  # noqa: E402
from tessera.util.garbage import freeze  # noqa: E402

# Ranks are given the path of who starts them; the server is not.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import generating  # noqa: E402
import interop_ranks  # noqa: E402, F401

generating.language_model("llama")
_model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
_step = tessera.train_step(
    _model, lambda model, x: model(x).square().mean(), torch.optim.AdamW(_model.parameters()), executors="aten"
)
_step(torch.ones(2, 4))
gc.collect()
freeze()
