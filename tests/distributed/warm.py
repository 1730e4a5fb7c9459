"""Imported by the server whose forks are ranks: what each would import and compile first is there already."""

from __future__ import annotations

import torch

import tessera

_model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
_step = tessera.train_step(
    _model, lambda model, x: model(x).square().mean(), torch.optim.AdamW(_model.parameters()), executors="aten"
)
_step(torch.ones(2, 4))
