"""Small programs to try passes on: recorded from plain PyTorch functions, or made at random from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import torch

import tessera  # noqa: F401  (registers the declarations that keep operators whole)
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.interp import run
from tessera.ir.record import record
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.ops.op import keep_whole


def trace_of(fn: Callable, *args: object, dynamic: tuple[int, ...] = (), along: Collection[int] = (0,)) -> Trace:
    """Record `fn` on fakes of these arguments; those in `dynamic` have symbolic sizes `along` these dimensions."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) if dynamic else fake.default_mode()
    fakes = []
    for i, a in enumerate(args):
        if not isinstance(a, torch.Tensor):
            fakes.append(a)
            continue
        sizes = [DimDynamic.DYNAMIC if i in dynamic and d in along else DimDynamic.STATIC for d in range(a.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes) if dynamic else None
        fakes.append(mode.from_tensor(a, static_shapes=None if dynamic else True, symbolic_context=context))
    names = [f"x{i}" for i in range(len(args))]
    trace, _ = record(fn, fakes, names, keep_whole, Builder("program", mode))
    return trace


def on_cuda(fn: Callable, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **own: torch.dtype) -> Trace:
    """`fn` recorded on tensors of a GPU that need not be there; `x1=torch.bool` says the dtype of one of them."""
    mode = fake.default_mode()
    names = [f"x{i}" for i in range(len(shapes))]
    with mode:
        given = [
            torch.empty(shape, dtype=own.get(name, dtype), device="cuda")
            for name, shape in zip(names, shapes, strict=True)
        ]
    return record(fn, given, names, keep_whole, Builder("program", mode))[0]


def copies(args: tuple) -> list:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def same_bits(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.is_floating_point:  # -0.0 differs from 0.0; a NaN equals a NaN of either sign
        signs = torch.signbit(a) == torch.signbit(b)
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) and bool((signs | a.isnan()).all())
    return torch.equal(a, b)


def assert_same(before: Trace, after: Trace, *args: object, runner: Callable = run) -> None:
    """Both programs give the same bits and leave the same bits in their arguments."""
    verify(after)
    left, right = copies(args), copies(args)
    torch.manual_seed(0)
    expected = run(before, *left)
    torch.manual_seed(0)
    got = runner(after, *right)
    assert len(expected) == len(got)
    for i, (e, g) in enumerate(zip(expected, got, strict=True)):
        assert same_bits(e, g), f"output {i} differs\n{before}\n{after}"
    for i, (e, g) in enumerate(zip(left, right, strict=True)):
        assert same_bits(e, g), f"argument {i} is left different\n{before}\n{after}"


# --- programs made at random ---


def random_program(seed: int, length: int = 14) -> tuple[Callable, list[torch.Tensor]]:
    """A function of three 4×4 tensors that views, writes, repeats itself and returns a few of its values."""

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        rng = random.Random(seed)
        pool = list(inputs)
        for _ in range(length):
            pool.append(_step(rng, pool))
        return [pool[rng.randrange(len(pool))] for _ in range(rng.randint(1, 4))] + [pool[-1]]

    generator = torch.Generator().manual_seed(seed)
    args = [torch.randn(4, 4, generator=generator) for _ in range(3)]
    args[0][0, 0], args[1][1, 1] = -0.0, float("nan")
    return program, args


def _step(rng: random.Random, pool: list[torch.Tensor]) -> torch.Tensor:
    a, b = rng.choice(pool), rng.choice(pool)
    i = rng.randrange(4)
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: a + b,
        lambda: a * b,
        lambda: a + 0,
        lambda: a - 0,
        lambda: a * 1,
        lambda: a / 1,
        lambda: a.neg().neg(),
        lambda: a.t().t(),
        lambda: a.transpose(0, 1),
        lambda: a.transpose(0, 1).transpose(0, 1),
        lambda: a.reshape(16).reshape(4, 4),
        lambda: a.reshape(2, 8).reshape(4, 4),
        lambda: a.clone(),
        lambda: a.detach(),
        lambda: a.contiguous(),
        lambda: a.expand(4, 4),
        lambda: a.float(),
        lambda: torch.relu(a),
        lambda: torch.sigmoid(a),
        lambda: a.exp().clamp(max=3.0),
        lambda: torch.where(a > b, a, b),
        lambda: a @ b,
        lambda: a.sum(0, keepdim=True) + b,
        lambda: a + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda: torch.arange(4).to(torch.float32) * a,
        lambda: torch.cat([a[:2], b[2:]]),
        lambda: a[i].unsqueeze(0).expand(4, 4),
        lambda: a.add_(b.exp()) if 0 not in a.stride() else a - b,
        lambda: a.mul_(2.0) if 0 not in a.stride() else a * 2.0,
        lambda: _write_row(a, i, b),
        lambda: _write_column(a, i, b),
        lambda: a.t().copy_(b + 1) if 0 not in a.stride() else a + b,
        lambda: torch.rand(4, 4) + a,
    ]
    return rng.choice(makers)()


def _write_row(a: torch.Tensor, i: int, b: torch.Tensor) -> torch.Tensor:
    if 0 in a.stride():
        return a + b
    a[i] = b[0] * 3
    return a


def _write_column(a: torch.Tensor, i: int, b: torch.Tensor) -> torch.Tensor:
    if 0 in a.stride():
        return a - b
    a[:, i : i + 1] = b[:, :1] - 1
    return a
