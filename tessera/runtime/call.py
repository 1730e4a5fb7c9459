"""The call path of one compiled graph: what happens between the caller's tensors and the generated code.

In: the compiled core, how outputs line up, which inputs are written. Out: one small generated function. It
runs the core, writes mutated inputs back, makes outputs that alias inputs, and puts everything in order.
Where a written input shares memory with another one or with itself, which no functional program can express, inside
forward-mode differentiation, and where views of a leaf have no gradient, it calls the original graph instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from tessera.ir.aliased import Aliased
from tessera.ir.types import overlaps_itself
from tessera.torch_internals.autograd import DUAL_LEVEL, is_tensor_view
from tessera.torch_internals.dispatch import BelowADInplaceOrView

REMEMBERED = 64  # sets of addresses


@dataclass(frozen=True)
class Layout:
    """Where each of the caller's outputs comes from."""

    # int: position among the core's results · Aliased (of_output: of such a position) · ("constant", value)
    outputs: tuple[object, ...]
    write_back: tuple[tuple[int, int], ...] = ()  # (input, position of its new contents), written outside the core
    written: tuple[int, ...] = ()  # every input the graph writes, inside or outside the core
    counted: tuple[int, ...] = ()  # inputs the core writes itself, which their versions are to count
    fixed: bool = False  # sizes and strides of all inputs are the same at every call
    placed: tuple[tuple[int, Aliased], ...] = ()  # (result, the view of an input whose memory it is to lie in)
    viewed: tuple[int, ...] = ()  # inputs that require gradients, of which the graph makes views under no_grad


def build_call(core: Callable, layout: Layout, eager: Callable, guarded: bool) -> Callable:
    """Generate the function a caller sees. `guarded` runs the core below autograd (it has no bridge)."""
    scope: dict[str, object] = {
        "core": core, "below": BelowADInplaceOrView, "eager": eager,
        "overlaps": Overlaps() if layout.fixed else overlaps,
        "bump": torch.autograd.graph.increment_version, "dual": forward_ad, "leaf_views": leaf_views,
    }  # fmt: skip
    # Tangents of forward mode hang on tensors unseen, and compiled programs would lose them.
    lines = ["def call(*args):", f"    if dual.{DUAL_LEVEL} >= 0:", "        return eager(*args)"]
    if layout.viewed:
        lines += [f"    if leaf_views(args, {layout.viewed!r}):", "        return eager(*args)"]
    if layout.written:
        lines += [f"    if overlaps(args, {layout.written!r}):", "        return eager(*args)"]
    if guarded:
        lines += ["    with below():", "        out = core(*args)"]
    else:
        lines += ["    out = core(*args)"]
    if layout.counted:
        lines.append(f"    bump([{', '.join(f'args[{i}]' for i in layout.counted)}])")
    for source, position in layout.write_back:
        # Autograd looks on, as on the eager in-place operator: it refuses a leaf that requires grad, and views of one.
        lines.append(f"    args[{source}].copy_(out[{position}])")
    if layout.placed:
        lines.append("    out = [*out]")
    for position, alias in layout.placed:  # the view, written once more, with the result's history
        scope[f"place{position}"] = alias.make
        lines.append(f"    out[{position}] = place{position}(args[{alias.source}]).copy_(out[{position}])")
    views = Views(layout.outputs, scope, lines)
    parts = [views.part(i) for i in range(len(layout.outputs))]
    plain = layout.outputs == tuple(range(len(layout.outputs))) and not layout.write_back and not layout.placed
    lines.append("    return out" if plain else f"    return ({', '.join(parts)}{',' if len(parts) == 1 else ''})")
    exec("\n".join(lines), scope)
    return scope["call"]  # type: ignore[return-value]


class Views:
    """Writes the lines that make outputs as views; what several outputs share is made once."""

    def __init__(self, outputs: Sequence[object], scope: dict[str, object], lines: list[str]) -> None:
        self.outputs, self.scope, self.lines = outputs, scope, lines
        found = [part for part in outputs if isinstance(part, Aliased)]
        self.asked = {part.shared for part in found if part.shared is not None}
        self.names: dict[int, str] = {}
        self.held: dict[tuple[int, int], str] = {}

    def part(self, index: int) -> str:
        """How an output is called in the code."""
        if index not in self.names:
            match self.outputs[index]:
                case int(place):
                    self.names[index] = name = f"out[{place}]"
                    # A view that is made already is shared as a whole.
                    self.held |= {shared: name for shared in self.asked if shared[0] == index}
                case Aliased() as part:
                    self.names[index] = self.made(index, part)
                case (_, value):
                    self.scope[f"constant{index}"] = value
                    self.names[index] = f"constant{index}"
        return self.names[index]

    def made(self, index: int, part: Aliased) -> str:
        begin, name = 0, f"{'out' if part.of_output else 'args'}[{part.source}]"
        if part.shared is not None:
            self.part(part.shared[0])
            begin, name = part.shared[1], self.held[part.shared]
        for end in sorted(k for i, k in self.asked if i == index and k > begin):
            self.lines.append(f"    view_{index}_{end} = {self.called(index, part, begin, end, name)}")
            begin, name = end, f"view_{index}_{end}"
            self.held[index, end] = name
        return self.called(index, part, begin, len(part.steps), name)

    def called(self, index: int, part: Aliased, begin: int, end: int, name: str) -> str:
        if begin == end:
            return name
        steps = part.part(begin, end)
        self.scope[f"view{index}_{end}"] = steps.make
        return f"view{index}_{end}({name}{', out' if steps.asks else ''})"


class Overlaps:
    """As `overlaps`, for inputs whose layouts never change: then their addresses say it all."""

    def __init__(self) -> None:
        self.apart: set[tuple[int, ...]] = set()

    def __call__(self, args: tuple, written: tuple[int, ...]) -> bool:
        places = tuple([x.data_ptr() for x in args if isinstance(x, torch.Tensor) and x.layout is torch.strided])
        if places in self.apart:
            return False
        if overlaps(args, written):
            return True
        if len(self.apart) >= REMEMBERED:
            self.apart.clear()
        self.apart.add(places)
        return False


def overlaps(args: tuple, written: tuple[int, ...]) -> bool:
    """Does a written input share memory with another input, or show one element in several places?"""
    owners: dict[int, list[int]] = {}
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            owners.setdefault(x.untyped_storage().data_ptr(), []).append(i)
    for i in written:
        shared = owners.get(args[i].untyped_storage().data_ptr(), ())
        if any(j != i and args[j].numel() and _ranges_meet(args[i], args[j]) for j in shared) or _repeats(args[i]):
            return True
    return False


def leaf_views(args: tuple, viewed: tuple[int, ...]) -> bool:
    """Is one of these a leaf and a view? A view requires gradients if its base does: one made under no_grad of such a
    leaf requires none, and may be written, while the graph takes the leaf for the base."""
    return any(args[i].is_leaf and is_tensor_view(args[i]) for i in viewed)


def _repeats(x: torch.Tensor) -> bool:
    """An expanded tensor, or windows of one: some operators write it all the same, element after element, but nothing
    can be copied into it."""
    return not x.is_contiguous() and overlaps_itself(x.shape, x.stride())


def _ranges_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a0, a1), (b0, b1) = _range(a), _range(b)
    return a0 < b1 and b0 < a1


def _range(x: torch.Tensor) -> tuple[int, int]:
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (extent + 1) * x.element_size()
