"""Tessera's own operators as printed programs call them: `tessera.cond(pred, if_true, if_false, x)`.

In a program that runs, the operator runs. In one that is being recorded, an edited program for instance, it becomes
an equation: the Python functions among its arguments are recorded as sub-traces, on what the operator calls them with.
So an operator with sub-traces calls each of them when it is given fake tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.dist import on
from tessera.ir.equation import SPECIALS, Special, Value, recompute_tag
from tessera.ir.mesh import Mesh
from tessera.ir.record import Recorder, record, recording
from tessera.ir.trace import Trace
from tessera.ir.types import type_of
from tessera.torch_internals.operators import OpOverload
from tessera.util.errors import CaptureError


class _Specials:
    @staticmethod
    @contextmanager
    def recompute(region: object) -> Iterator[None]:
        """What is recorded inside runs again in backward; regions of one name are one."""
        recorder = recording()
        before = recorder.extra_tags if recorder else frozenset()
        if recorder is not None:
            recorder.extra_tags = before | {recompute_tag(region)}
        try:
            yield
        finally:
            if recorder is not None:
                recorder.extra_tags = before

    @staticmethod
    def number(n: object) -> object:
        """A symbolic number as a value; in a program that is being recorded it is a number as others are."""
        return n

    def __getattr__(self, name: str) -> Callable:
        if name not in SPECIALS:
            raise AttributeError(f"no operator tessera.{name}; there are {', '.join(sorted(SPECIALS))}")
        return functools.partial(call_special, SPECIALS[name])


specials = _Specials()


class collectives:  # noqa: N801 - a printed program calls it once, as `dist`
    """The collectives of a mesh, of these axes."""

    def __init__(self, **axes: int) -> None:
        self._on = on(Mesh.of(axes))

    def __getattr__(self, name: str) -> Callable:
        return functools.partial(call_special, getattr(self._on, name))


def call_special(op: Special, *args: object, **kwargs: object) -> object:
    """Run one of Tessera's operators, or write it into the program that is being recorded."""
    recorder = recording()
    if recorder is None:
        return op.fn(*args, **kwargs)
    subs = tuple(_Sub(a, recorder) if _is_function(a) else a for a in args)  # type: ignore[arg-type]
    with fake.alone(), recorder.builder.mode, fake.below_autograd():
        types = fake.types_of(op.fn(*subs, **kwargs))
    args = tuple(a.recorded() if isinstance(a, _Sub) else a for a in subs)
    many = fake.is_many(types)
    outs = recorder.special(op, args, kwargs, types if many else [types], many)  # type: ignore[arg-type]
    return outs if many else outs[0]


def _is_function(a: object) -> bool:
    return callable(a) and not isinstance(a, (torch.Tensor, OpOverload))


class _Sub:
    """A function of a printed program, recorded when it is called."""

    def __init__(self, fn: Callable, recorder: Recorder) -> None:
        self.fn, self.recorder = fn, recorder
        self.trace: Trace | None = None

    def __call__(self, *args: object) -> tuple:
        key = (self.fn, tuple(type_of(x).key() for x in args))
        if key not in self.recorder.bodies:
            self.recorder.bodies[key] = self.record(args)
        trace = self.trace = self.recorder.bodies[key]
        mode = self.recorder.builder.mode
        return tuple(fake.fake_of(o.tensor, mode) if isinstance(o, Value) else o for o in trace.outputs)

    def record(self, args: tuple) -> Trace:
        name, code = self.fn.__name__, self.fn.__code__
        names = list(code.co_varnames[: code.co_argcount])
        if len(names) != len(args):
            raise CaptureError(f"{name}: expected a function of {len(args)} arguments, got one of {len(names)}")
        mode = self.recorder.builder.mode
        with fake.alone():
            fakes = [fake.fake_of(type_of(x), mode) if isinstance(x, torch.Tensor) else x for x in args]  # type: ignore[arg-type]
            trace, _ = record(self.fn, fakes, names, self.recorder.keep, Builder(name, mode))
        if trace.mutations or trace.constants:
            what = "writes into an argument" if trace.mutations else "uses a tensor that is no argument of it"
            raise CaptureError(f"{name} {what}; a function given to an operator computes from its arguments alone")
        return trace

    def recorded(self) -> Trace:
        if self.trace is None:
            raise CaptureError(f"nothing called {self.fn.__name__}: what it takes is not known")
        return self.trace
