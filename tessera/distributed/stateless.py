"""A model while its call is traced: its weights and buffers are others, and it is left as it was.

In: a model, tensors by the model's names, a function that may call the model and reach into it. Out: what the function
gives. A buffer that is bound anew is written, as programs write buffers. Fake tensors that the forward hangs on modules
under other names are taken off in the end: the function sees them, later calls do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tessera.torch_internals import pytree
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.modules import own_buffers
from tessera.util.errors import CaptureError


class _Around(nn.Module):
    """A function, called while the model's tensors are others."""

    def __init__(self, model: nn.Module, fn: Callable[[], object]) -> None:
        super().__init__()
        self.model, self.fn = model, fn

    def forward(self) -> object:
        return self.fn()


def with_tensors(model: nn.Module, tensors: Mapping[str, Tensor], fn: Callable[[], object]) -> object:
    given = {f"model.{name}": x for name, x in _tied(model, tensors).items()}
    left = dict(given)  # functional_call writes into it what the model held in the end
    out = functional_call(_Around(model, fn), left, (), tie_weights=False)
    for name, new in left.items():
        if new is not given[name]:
            _write(name.removeprefix("model."), given[name], new)
    return out


def _tied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Beside names of the model's own, those of weights that several modules share; a module that stands in several
    places is given its tensors once, since PyTorch would put the second ones back in the end."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = {id(own[name]): x for name, x in tensors.items()}
    there = [
        (f"{prefix}.{key}" if prefix else key, x)
        for prefix, module in model.named_modules()
        for key, x in (*module._parameters.items(), *own_buffers(module).items())
    ]
    return {name: given[id(x)] for name, x in there if id(x) in given}


def _write(name: str, held: Tensor, new: Tensor | None) -> None:
    if new is None or new.shape != held.shape or new.dtype != held.dtype:
        came = "None" if new is None else f"{list(new.shape)} of {new.dtype}"
        raise CaptureError(
            f"{name}: expected the model's forward to leave a buffer of {list(held.shape)} and {held.dtype}, as it "
            f"was, got {came}"
        )
    with torch.no_grad():
        held.copy_(new)


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Attributes of modules that are fake tensors afterwards, or hold such, are what they were before."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        changed = [(m, name, vars(m)[name]) for m in before for name in vars(m)]
        changed = [(m, name, x) for m, name, x in changed if x is not before[m].get(name) and _is_traced(x)]
        for module, name, _ in changed:
            if name in before[module]:
                vars(module)[name] = before[module][name]
            else:
                del vars(module)[name]
    for module, name, _ in changed:
        if isinstance(before[module].get(name), Tensor):
            raise CaptureError(
                f"{type(module).__name__}.{name}: the forward binds a new tensor where there was one, which later "
                "calls on a mesh would not see; expected a buffer: register_buffer"
            )


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """A call that is made to look at it alone leaves no attribute changed, such as a counter."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, held in before.items():
            for name in vars(module).keys() - held.keys():
                del vars(module)[name]
            vars(module).update(held)


def _is_traced(x: object) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(x))
