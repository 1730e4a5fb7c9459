"""What a model of the zoo is, and how it is drawn: on a device, in a precision, from a fixed seed.

In: a `Network`, which names a function and its sizes. Out: a `Made`, whose model takes its inputs and gives a loss, or,
for inference, its outputs. Dropout is off, since everyone must compute the same; parameters that are zero everywhere
are drawn anew, since they would hide what is wrong; batch norms stay in float32, as mixed precision keeps them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tessera.tools.bench.model_jobs import Job, Made, cast
from tessera.torch_internals.modules import Dropout

Drawn = tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]  # a model, its inputs, its targets
TRAIN, INFER = "train", "infer"
SEED = 0


@dataclass(frozen=True)
class Network:
    """One model. With its targets it gives a loss; without them, where `infer` says so, its outputs."""

    name: str
    family: str
    draw: Callable[..., Drawn]
    full: dict[str, object]  # fills a large GPU in bf16, at most about 100 ms a step
    tiny: dict[str, object]  # a moment on a CPU
    infer: bool = False  # inference is measured too
    small: bool = False  # the host decides how fast it is
    rounds: bool = True  # bf16 gives nearly what float32 gives; not where a choice between experts hangs on rounding

    @property
    def kinds(self) -> tuple[str, ...]:
        return (TRAIN, INFER) if self.infer else (TRAIN,)

    def sizes(self, tiny: bool) -> dict[str, object]:
        return self.tiny if tiny else self.full

    def title(self, kind: str) -> str:
        return self.name if kind == TRAIN else f"{self.name}-{kind}"

    def definition(self, kind: str, tiny: bool) -> str:
        """A hash of all that says what is computed: the model's source, its sizes, and how it is drawn."""
        sources = [inspect.getsource(sys.modules[module]) for module in (self.draw.__module__, __name__)]
        told = json.dumps([self.draw.__name__, kind, self.sizes(tiny)], sort_keys=True, default=str)
        return hashlib.sha256("\0".join([told, *sources]).encode()).hexdigest()[:16]


def job(network: Network, kind: str, tiny: bool) -> Job:
    """The network as a job that contestants of `tessera bench models` can enter."""
    dtype = torch.float32 if tiny else torch.bfloat16
    return Job(
        network.title(kind), shown(network.sizes(tiny)), kind, partial(make, network, kind, tiny, dtype=dtype), dtype
    )


def shown(sizes: dict[str, object]) -> str:
    """The sizes of the inputs in a word."""
    inputs = ("batch", "time", "length", "target", "side", "points", "nodes", "edges")
    return "x".join(str(sizes[name]) for name in inputs if name in sizes)


def make(network: Network, kind: str, tiny: bool, device: str, dtype: torch.dtype) -> Made:
    torch.manual_seed(SEED)
    with torch.device(device):
        model, inputs, targets = network.draw(**network.sizes(tiny))
        settle(model)
    model = model.to(dtype).train(kind == TRAIN)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.float()
    return Made(model, cast((*inputs, *(targets if kind == TRAIN else ())), dtype))


def settle(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Turn dropout off and draw parameters that are zero everywhere."""
    for module in model.modules():
        for name, held in list(vars(module).items()):
            if "drop" in name and isinstance(held, float):
                vars(module)[name] = 0.0
        if isinstance(module, Dropout):
            module.p = 0.0  # type: ignore[assignment]
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and not p.any():
                p.normal_(std=0.02, generator=generator)
