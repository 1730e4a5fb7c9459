"""Plain models, recorded at once.

In: a module, tensors as its arguments, and the sizes that may change. Out: the Trace that `torch.export` and
`capture_export` would give, made in one run of the module's Python instead of two of its operators; or None where
`torch.export` has more to say: of sizes that the program asks about, control flow, state other than parameters and
buffers, or anything that fails.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tessera.frontends.captured import Captured, capture
from tessera.frontends.size_roots import tell_roots
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Source
from tessera.ir.recurrent import RECURRENT
from tessera.ops.op import keep_whole
from tessera.torch_internals.exporting import as_if_exported, fake_arguments, is_layer, is_program
from tessera.torch_internals.operators import OpOverload
from tessera.torch_internals.padded_encoder import exported_encoders
from tessera.torch_internals.shapes import asking_for_one, lines_by_folder


@dataclass(frozen=True)
class RecordedModel:
    captured: Captured
    held: dict[str, torch.Tensor]  # parameters and buffers by name: the first inputs


def recorded_model(
    module: nn.Module, args: tuple, names: tuple[str, ...], shapes: object, name: str
) -> RecordedModel | None:
    """`shapes` as `torch.export` takes them; `names` of the positional arguments, of which all are tensors."""
    if not _plain(module, args, names):
        return None
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    try:
        with _unchanged(module), torch.no_grad(), exported_encoders(), lines_by_folder(), asking_for_one():
            return _recorded(module, args, names, shapes, name, tensors)
    except Exception:  # noqa: BLE001 - torch.export then captures it, or says why not
        return None


def _plain(module: nn.Module, args: tuple, names: tuple[str, ...]) -> bool:
    """Whether arguments and weights stand for themselves, under one name each."""
    weights = [p for pairs in (module.named_parameters, module.named_buffers) for _, p in pairs(remove_duplicate=False)]
    modules = [m for _, m in module.named_modules(remove_duplicate=False)]
    once = all(len(set(map(id, things))) == len(things) for things in ((*weights, *args), modules))
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    traced = any(map(_is_traced, modules))
    lower = all(name == name.lower() for name in names)  # torch.export calls them so
    return once and lower and not traced and all(type(x) in kinds for x in (*weights, *args))


def _is_traced(module: nn.Module) -> bool:
    """Whether calling it runs something else than its Python."""
    scripted = isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule))
    return scripted or hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _recorded(
    module: nn.Module, args: tuple, names: tuple[str, ...], shapes: object, name: str, tensors: dict[str, torch.Tensor]
) -> RecordedModel | None:
    mode, fakes = fake_arguments(module, args, shapes)
    env = mode.shape_env
    weights = [mode.from_tensor(x, static_shapes=True) for x in tensors.values()]
    known = dict(env.replacements), dict(env.var_to_range)

    def call(*inputs: torch.Tensor) -> object:
        tell_roots(inputs)
        given = dict(zip(tensors, inputs, strict=False))
        paths = {f"module.{path}": x for path, x in given.items()}
        return torch.func.functional_call(_Held(module, given), paths, inputs[len(given) :])

    builder = _LocatedBuilder(name, mode, {id(m): path for path, m in module.named_modules()})
    places = [path.replace(".", "_") for path in tensors]
    with as_if_exported():
        captured = capture(call, [*weights, *fakes], [*places, *names], _whole, builder, locate=False)
    asked = env.guards or env.deferred_runtime_asserts or known != (dict(env.replacements), dict(env.var_to_range))
    if asked or captured.trace.constants or not all(map(_known, captured.trace.equations)):
        return None
    return RecordedModel(captured, tensors)


def _whole(op: OpOverload) -> bool:
    return keep_whole(op) or op in RECURRENT


def _known(eqn: Equation) -> bool:
    return isinstance(eqn.op, OpOverload) and eqn.op.namespace == "aten"


class _Held(nn.Module):
    """The module, and a look at whether it still holds what it was given when it has run."""

    def __init__(self, module: nn.Module, given: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.module, self.given = module, given

    def forward(self, *args: torch.Tensor) -> object:
        out = self.module(*args)
        now = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        if now.keys() != self.given.keys() or any(now[name] is not x for name, x in self.given.items()):
            raise ValueError("the module was given other weights by itself")
        return out


class _LocatedBuilder(Builder):
    """Equations know the line and the module that run."""

    def __init__(self, name: str, mode: Any, paths: dict[int, str]) -> None:
        self.paths = paths
        super().__init__(name, mode)

    @property
    def source(self) -> Source:  # type: ignore[override]
        file, line, module, frame = "", 0, "", sys._getframe(1)
        while frame is not None and (code := frame.f_code) is not _OUTSIDE:
            better = not file or (is_layer(file) and not is_layer(code.co_filename))
            if better and is_program(code.co_filename, code.co_name):
                file, line = code.co_filename, frame.f_lineno
            if code is _CALL and not module:
                module = self.paths.get(id(frame.f_locals["self"]), "")
            if file and not is_layer(file) and module:
                break
            frame = frame.f_back
        return Source(file, line, module)

    @source.setter
    def source(self, _: Source) -> None:
        """It is where the program is."""


_CALL, _OUTSIDE = nn.Module._call_impl.__code__, _Held.forward.__code__


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Inside, the module may be called. If that gave it, or a list, dict or set of it, something else, what it had is
    put back, and an error says so."""
    owned = [vars(m) for m in module.modules()]
    owned += [x for attributes in owned for x in attributes.values() if type(x) in (list, dict, set)]
    before = [(x, x.copy()) for x in owned]
    try:
        yield
    finally:
        changed = [(x, had) for x, had in before if not _same(x, had)]
        for x, had in changed:
            x.clear()
            (x.extend if isinstance(x, list) else x.update)(had)
    if changed:
        raise ValueError("the module changes what it holds beside parameters and buffers")


def _same(now: Any, had: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == had.keys() and all(now[key] is x for key, x in had.items())
    return len(now) == len(had) and all(map(operator.is_, now, had)) if isinstance(now, list) else now == had
