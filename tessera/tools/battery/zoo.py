"""The models of `tessera bench zoo` at their tiny sizes: evaluation and training, in float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from tessera.tools.battery.case import Case, Part, Skip
from tessera.tools.battery.models import check_model
from tessera.tools.bench.zoo.models_library import library
from tessera.tools.bench.zoo.network import SEED
from tessera.tools.bench.zoo.registry import ZOO

DTYPES = (torch.float32, torch.bfloat16)


def cases(device: str) -> list[Case]:
    return [Case("zoo", name, 30.0, limit=300.0) for name in ZOO]


def parts(case: str, device: str) -> Iterator[Part]:
    for dtype in DTYPES if ZOO[case].rounds else DTYPES[:1]:
        for training in (False, True):
            name = f"{'training' if training else 'evaluation'} {str(dtype).removeprefix('torch.')}"
            yield name, partial(check_model, partial(build, case, training), device, dtype, training)


def build(name: str, training: bool) -> tuple[nn.Module, tuple, dict]:
    """The network and its inputs; with its targets, unless it can be evaluated without."""
    network = ZOO[name]
    if network.draw is library and find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    torch.manual_seed(SEED)
    model, inputs, targets = network.draw(**network.tiny)
    return model, (*inputs, *(targets if training or not network.infer else ())), {}
