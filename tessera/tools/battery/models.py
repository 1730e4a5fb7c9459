"""A whole model, eager and compiled: evaluation and training, against eager and float64.

In: what builds a model and its inputs, the same each time. Dropout is off, since a compiled program may draw other
numbers; parameters that are zero everywhere are drawn anew, since they hide what is wrong.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tessera
from tessera.tools.battery.case import Part, Skip, Wrong
from tessera.tools.battery.compare import FACTOR, distance, plain
from tessera.tools.bench.zoo.network import settle
from tessera.torch_internals import pytree

Build = Callable[[], tuple[nn.Module, tuple, dict]]
# Besides twice eager's own distance from float64; many small sums are rounded in a model.
SMALL = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Answer:
    """What a model gave: its results, every parameter's gradient, its buffers afterwards."""

    results: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What an answer is held against."""

    eager: Answer
    exact: Answer
    dtype: torch.dtype
    rounded: Callable[[], list[Answer]]  # asked where an answer is far from the exact one


NOISE = 5e-2  # of the largest gradient's norm
SHAKES, ROUNDINGS = 8, 8  # answers to compute, and how far off their parameters are


def model_parts(build: Build, device: str, half: bool = True) -> Iterator[Part]:
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" and half else (torch.float32,):
        for training in (False, True):
            name = f"{'training' if training else 'evaluation'} {str(dtype).removeprefix('torch.')}"
            yield name, _trial(build, device, dtype, training)


def _trial(build: Build, device: str, dtype: torch.dtype, training: bool) -> Callable[[], None]:
    return lambda: check_model(build, device, dtype, training)


def check_model(build: Build, device: str, dtype: torch.dtype, training: bool, **options: object) -> None:
    try:
        model, args, kwargs = prepared(build, training)
        exact = answer(*placed(model, args, kwargs, device, torch.float64), training=training)
        eager = answer(*placed(model, args, kwargs, device, dtype), training=training)
    except Skip:
        raise
    except Exception as error:
        raise Skip(f"eager: {type(error).__name__}: {error}") from error
    rounded = functools.cache(lambda: rounded_answers(model, args, kwargs, device, dtype, training))
    mine, given, named = placed(model, args, kwargs, device, dtype)
    fast = tessera.jit(mine, strict=True, **options)  # type: ignore[arg-type]
    for call in range(2):  # the second call must not see what the first left
        mine.load_state_dict(placed(model, (), {}, device, dtype)[0].state_dict())
        compare(answer(fast, given, named, training=training), Reference(eager, exact, dtype, rounded), call)


def rounded_answers(
    model: nn.Module, args: tuple, kwargs: dict, device: str, dtype: torch.dtype, training: bool
) -> list[Answer]:
    """In float64, with parameters and inputs off by a few roundings. Where an activation lies that close to a kink (a
    ReLU's zero), its gradient is there or not, and everything before it changes: no computation can tell which."""
    return [answer(*shaken(model, args, kwargs, device, dtype, seed), training=training) for seed in range(SHAKES)]


def shaken(
    model: nn.Module, args: tuple, kwargs: dict, device: str, dtype: torch.dtype, seed: int
) -> tuple[nn.Module, tuple, dict]:
    model, args, kwargs = placed(model, args, kwargs, device, torch.float64)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for t in (*model.parameters(), *(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))):
            if t.dtype == torch.float64:
                noise = torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)
                t.mul_(1 + noise * ROUNDINGS * torch.finfo(dtype).eps)
    return model, args, kwargs


def prepared(build: Build, training: bool) -> tuple[nn.Module, tuple, dict]:
    model, args, kwargs = build()
    settle(model, torch.Generator().manual_seed(0))
    return model.train(training), args, kwargs


def placed(
    model: nn.Module, args: tuple, kwargs: dict, device: str, dtype: torch.dtype
) -> tuple[nn.Module, tuple, dict]:
    """Copies there, in that precision."""

    def moved(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() else t.dtype, copy=True)

    args, kwargs = pytree.tree_map_only(Tensor, moved, (args, kwargs))
    return copy.deepcopy(model).to(device, dtype), args, kwargs


def answer(model: Callable, args: tuple, kwargs: dict, training: bool) -> Answer:
    held: nn.Module = model  # type: ignore[assignment]
    torch.manual_seed(0)
    held.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(training):
        out = model(*args, **kwargs)
        if training:
            loss_of(out).backward()
    gradients = {n: p.grad for n, p in held.named_parameters()} if training else {}
    buffers = {n: b.detach().clone() for n, b in held.named_buffers()}
    return Answer([t.detach() for t in flat(out)], gradients, buffers)


def flat(out: object) -> list[Tensor]:
    if hasattr(out, "to_tuple"):
        out = out.to_tuple()  # type: ignore[attr-defined]
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, (list, tuple)):
        return [t for item in out for t in flat(item)]
    return [out] if isinstance(out, Tensor) else []


def loss_of(out: object) -> Tensor:
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if loss is not None:
        return loss
    parts = [t for t in flat(out) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in parts]).sum()


def compare(mine: Answer, reference: Reference, call: int) -> None:
    eager, exact = reference.eager, reference.exact
    when = "" if call == 0 else " of the second call"
    if len(mine.results) != len(eager.results):
        raise Wrong(f"expected {len(eager.results)} results, got {len(mine.results)}{when}")
    for place, (a, b) in enumerate(zip(mine.results, eager.results, strict=True)):
        one(f"result {place}{when}", a, b, reference, lambda answer, place=place: answer.results[place])
    scale = max((float(plain(g).norm()) for g in exact.gradients.values() if g is not None), default=0.0)
    for name, b in eager.gradients.items():
        a, c = mine.gradients[name], exact.gradients[name]
        if (a is None) != (b is None):
            given = ["None" if g is None else "a tensor" for g in (b, a)]
            raise Wrong(f"gradient of {name}{when}: expected {given[0]}, got {given[1]}")
        if a is not None and b is not None and c is not None:
            one(f"gradient of {name}{when}", a, b, reference, lambda answer, name=name: answer.gradients[name], scale)
    for name, b in eager.buffers.items():
        one(f"buffer {name}{when}", mine.buffers[name], b, reference, lambda answer, name=name: answer.buffers[name])


def one(
    what: str, a: Tensor, b: Tensor, reference: Reference, of: Callable[[Answer], Tensor | None], scale: float = 0.0
) -> None:
    """Raise `Wrong` where `a` is farther from the exact result than eager's `b`, and than rounding alone may be."""
    dtype, exact = reference.dtype, of(reference.exact)
    assert exact is not None
    if a.shape != b.shape or a.dtype != b.dtype:
        raise Wrong(f"{what}: expected {b.dtype} {tuple(b.shape)}, got {a.dtype} {tuple(a.shape)}")
    if not b.is_floating_point():
        if not torch.equal(a, b):
            raise Wrong(f"{what}: {int((a != b).sum())} of {b.numel()} elements differ")
        return
    if not torch.equal(a.isfinite(), b.isfinite()):
        raise Wrong(f"{what}: not finite where eager is, or the reverse")
    # Gradients that are nothing but rounding, such as that of a bias in front of a batch norm.
    floor = NOISE * scale / max(float(plain(exact).norm()), 1e-300)
    small = SMALL.get(dtype, 1e-9) * (1 + floor)
    mine, theirs = distance(a, exact), distance(b, exact)
    if mine <= FACTOR * theirs + small:
        return
    by_rounding = max(distance(x, exact) for answer in reference.rounded() if (x := of(answer)) is not None)
    if mine > FACTOR * by_rounding + small:
        raise Wrong(
            f"{what}: {mine:.2g} from float64, eager {theirs:.2g}, rounding up to {by_rounding:.2g} "
            f"({dtype}, {tuple(b.shape)})"
        )
