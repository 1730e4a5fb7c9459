"""A model's state and the random generators, as they were: what a tool that runs a user's program puts back.

Noted: contents of parameters, buffers, arguments and tensors a function closes over; plain attributes of modules;
the generators of the CPU and of every GPU that is in use. Tensors keep their identity: contents are written back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType

import torch

from tessera.torch_internals import pytree
from tessera.torch_internals.modules import own_buffers

PLAIN = (int, float, bool, str, type(None), tuple)


class Saved:
    def __init__(self, fn: Callable, args: tuple, kwargs: dict) -> None:
        self.modules = list(modules_of(fn))
        leaves = [*pytree.tree_leaves((args, kwargs)), *closed_over(fn)]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        for module in self.modules:
            tensors += [*module.parameters(), *module.buffers()]
        self.tensors = [(x, x.detach().clone()) for x in {id(x): x for x in tensors}.values()]
        self.attributes = [
            (m, {k: v for k, v in m.__dict__.items() if isinstance(v, PLAIN)}, dict(own_buffers(m)))
            for module in self.modules
            for m in module.modules()
        ]
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        with torch.no_grad():
            for x, contents in self.tensors:
                x.copy_(contents)
        for module, attributes, buffers in self.attributes:
            for name in [k for k, v in module.__dict__.items() if isinstance(v, PLAIN) and k not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            own_buffers(module).clear()
            own_buffers(module).update(buffers)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


def modules_of(fn: Callable) -> Iterator[torch.nn.Module]:
    """The modules a callable runs, as far as it shows them: itself, its owner, what it closes over."""
    if isinstance(fn, torch.nn.Module):
        yield fn
    elif isinstance(fn, MethodType):
        yield from modules_of(fn.__self__)  # type: ignore[arg-type]
    elif isinstance(fn, functools.partial):
        yield from modules_of(fn.func)
        yield from (a for a in fn.args if isinstance(a, torch.nn.Module))
    else:
        yield from (x for x in _cells(fn) if isinstance(x, torch.nn.Module))


def closed_over(fn: Callable) -> list[torch.Tensor]:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return [x for x in _cells(inner) if isinstance(x, torch.Tensor)]


def _cells(fn: object) -> list[object]:
    contents = []
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    code = getattr(fn, "__code__", None)
    scope = getattr(fn, "__globals__", {})
    return contents + [scope[name] for name in getattr(code, "co_names", ()) if name in scope]
