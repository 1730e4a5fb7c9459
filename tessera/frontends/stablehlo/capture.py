"""A StableHLO program becomes a Trace.

In: a `Module` and the tensors of a call. Out: a `Captured`, the constants that are its last inputs, and for which
other calls it holds. Sizes that the program leaves open (`?`) are symbols; what it asserts of them becomes part of
the Trace, and what had to be assumed to trace it is in `Fits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tessera.frontends.captured import Captured, capture
from tessera.frontends.functional import checks  # noqa: F401  (assertions become part of the program)
from tessera.frontends.functional.trace import ASKS_A_VALUE, watching
from tessera.frontends.requires_grad import requires_grad_known
from tessera.frontends.stablehlo import operators  # noqa: F401  (fills the table of meanings)
from tessera.frontends.stablehlo.limits import value_limit
from tessera.frontends.stablehlo.module import Module, Tensor
from tessera.frontends.stablehlo.patterns import whole_operators
from tessera.frontends.stablehlo.run import Interpreter
from tessera.frontends.stablehlo.values import Value
from tessera.ir.builder import Builder
from tessera.ops.op import keep_whole
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.shapes import ShapeEnv, guards_hold, guards_of, symbolic_fake
from tessera.util.errors import CaptureError, InputError


@dataclass(frozen=True)
class Fits:
    """For which sizes a captured program holds."""

    env: ShapeEnv
    guards: str
    symbols: tuple[tuple[int, int], ...]  # (argument, dimension) of each size that is a symbol
    numbers: tuple[tuple[int, int, int], ...]  # (argument, dimension, size): open in the program, and a number here

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        if any(tensors[i].shape[d] != n for i, d, n in self.numbers):
            return False
        return guards_hold(self.env, self.guards, [tensors[i].shape[d] for i, d in self.symbols])


class Imported:
    """A program that can be run on real tensors and captured."""

    def __init__(self, module: Module, limit: int | None = None) -> None:
        self.module, self.limit = module, limit
        self.constants: dict[torch.device, dict[int, Value]] = {}

    @property
    def types(self) -> tuple[Tensor, ...]:
        return self.module.main.body.types  # type: ignore[return-value]

    def run(self, *tensors: torch.Tensor) -> list[object]:
        """What the program gives for these, computed operation by operation."""
        device = tensors[0].device if tensors else torch.device("cpu")
        given = self.module.size + sum(x.numel() * x.element_size() for x in tensors if isinstance(x.numel(), int))
        limit = value_limit(given) if self.limit is None else self.limit
        interpreter = Interpreter(self.module, device, limit, self.constants.setdefault(device, {}))
        return list(interpreter.main(tensors))

    def check(self, tensors: Sequence[object]) -> list[torch.Tensor]:
        """The arguments, if they are what the program takes."""
        name = self.module.name
        if len(tensors) != len(self.types):
            raise InputError(f"{name}: expected {len(self.types)} arguments, got {len(tensors)}")
        checked = []
        for place, (x, t) in enumerate(zip(tensors, self.types, strict=True)):
            if not isinstance(t, Tensor):
                kind = type(t).__name__.lower()
                raise InputError(
                    f"{name}, argument {place}: expected a program of tensors, got one that takes a {kind}"
                )
            if not isinstance(x, torch.Tensor) and isinstance(x, (bool, int, float, complex)) and not t.rank:
                x = torch.tensor(x, dtype=t.element.dtype)
            if not isinstance(x, torch.Tensor):
                raise InputError(f"{name}, argument {place}: expected a tensor {t}, got a {type(x).__name__}")
            fits = len(x.shape) == t.rank and all(w is None or n == w for n, w in zip(x.shape, t.shape, strict=True))
            if not fits or x.dtype != t.element.dtype:
                raise InputError(f"{name}, argument {place}: expected {t}, got {x.dtype} {tuple(x.shape)}")
            checked.append(x)
        devices = {x.device for x in checked}
        if len(devices) > 1:
            raise InputError(f"{name}: expected arguments on one device, got {', '.join(sorted(map(str, devices)))}")
        return checked

    def capture(
        self, tensors: Sequence[torch.Tensor], names: list[str], name: str
    ) -> tuple[Captured, tuple[torch.Tensor, ...], Fits]:
        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        fakes: list = [self.stand_in(mode, i, x) for i, x in enumerate(tensors)]
        opened = [(i, d) for i, t in enumerate(self.types) for d, n in enumerate(t.shape) if n is None]
        symbols = [(i, d) for i, d in opened if isinstance(fakes[i].shape[d], torch.SymInt)]
        sizes = [fakes[i].shape[d] for i, d in symbols]
        builder = Builder(name, mode)
        try:
            with watching(builder), requires_grad_known(builder, fakes):
                captured = capture(self.run, fakes, names, keep_whole, builder, locate=False, close=True)
        except ASKS_A_VALUE as error:
            reason = str(error).splitlines()[0]
            raise CaptureError(f"the program asks what a tensor holds, which only a run tells: {reason}") from error
        whole = whole_operators(captured.trace)
        lifted = tuple(whole.constants.values())
        trace = whole.with_(inputs=(*whole.inputs, *whole.constants), constants={})
        grads = (*(x.requires_grad for x in tensors), *(False for _ in lifted))
        numbers = tuple((i, d, tensors[i].shape[d]) for i, d in opened if (i, d) not in symbols)
        fits = Fits(env, guards_of(env, sizes), tuple(symbols), numbers)
        return replace(captured, trace=trace, requires_grad=grads), lifted, fits

    def stand_in(self, mode: FakeTensorMode, place: int, x: torch.Tensor) -> torch.Tensor:
        alone = x.detach().requires_grad_(x.requires_grad)
        dynamic = [n is None for n in self.types[place].shape]
        if not any(dynamic):
            return mode.from_tensor(alone, static_shapes=True)
        return symbolic_fake(mode, alone, dynamic, f"argument_{place}")
