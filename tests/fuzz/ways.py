"""The ways to run a program: by eager PyTorch, by PyTorch that does one thing otherwise than it usually does, by a
backend of PyTorch's own, by Tessera. A way is what `compiled` and `T` are in the program's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch._dynamo
from torch import nn
from torch.utils._pytree import tree_map

import tessera
from tessera.pipeline.lists import PIPELINES, remove

if "tessera" not in torch._dynamo.list_backends():  # the package is not installed, which registers it
    torch._dynamo.register_backend(tessera.backend, "tessera")

Way = tuple[Callable, object]


def as_written(fn: Callable) -> Callable:
    return fn


class Eager:
    """What `T` is for eager PyTorch; `compiled` compiles the loss of a training step by somebody else."""

    def __init__(self, compiled: Callable = as_written) -> None:
        self.compiled = compiled

    def __getattr__(self, name: str) -> Callable:
        return getattr(torch.func, name)

    def train_step(
        self, model: nn.Module, loss_fn: Callable, optimizer: torch.optim.Optimizer, clip_norm: float = 0
    ) -> Callable:
        loss_fn = self.compiled(loss_fn)

        def step(*batch: object) -> object:
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            if clip_norm:
                found = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(found, clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step


class Looped(Eager):
    """vmap as what it means: one example after the other. PyTorch's own shares a gradient among equal maxima otherwise
    where it is batched than where it is not."""

    def vmap(self, fn: Callable, in_dims: object = 0, **_: object) -> Callable:
        def call(*args: torch.Tensor) -> object:
            dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
            pairs = list(zip(args, dims, strict=True))
            count = next(a.shape[d] for a, d in pairs if d is not None)
            rows = [fn(*(a if d is None else a.select(d, i) for a, d in pairs)) for i in range(count)]
            return tree_map(lambda *xs: torch.stack(xs), *rows)

        return call


class Typed(Eager):
    """Tangents have the dtype of what moves. PyTorch's write of float64 into float32 leaves a tangent of float64 unless
    there was one of float32 before; its own products then refuse the two."""

    def jvp(self, fn: Callable, primals: tuple, tangents: tuple) -> tuple:
        out, moved = torch.func.jvp(fn, primals, tangents)
        return out, tree_map(lambda o, t: t.to(o.dtype), out, moved)

    def jacfwd(self, fn: Callable, argnums: tuple[int, ...]) -> Callable:
        def call(*args: torch.Tensor) -> object:
            def twice(*args: torch.Tensor) -> tuple:
                out = fn(*args)
                return out, out

            jacobians, out = torch.func.jacfwd(twice, argnums, has_aux=True)(*args)
            return tree_map(lambda o, js: tree_map(lambda j: j.to(o.dtype), js), out, jacobians)

        return call


class Pulled(Eager):
    """vjp and jacrev by grad. PyTorch's own divide a product by its elements, which grad does not: infinities tell."""

    def vjp(self, fn: Callable, *args: torch.Tensor) -> tuple:
        def pull(cts: tuple) -> tuple:
            def weighted(*args: torch.Tensor) -> torch.Tensor:
                return sum((o * ct).sum() for o, ct in zip(fn(*args), cts, strict=True))  # type: ignore[return-value]

            return torch.func.grad(weighted, tuple(range(len(args))))(*args)

        return fn(*args), pull

    def jacrev(self, fn: Callable, argnums: tuple[int, ...]) -> Callable:
        def call(*args: torch.Tensor) -> tuple:
            out, pull = self.vjp(fn, *args)

            def rows(k: int) -> tuple:
                """The gradients of every element of one result."""
                basis = torch.eye(out[k].numel(), dtype=out[k].dtype).view(-1, *out[k].shape)
                pulled = [pull(tuple(b if i == k else torch.zeros_like(o) for i, o in enumerate(out))) for b in basis]
                return tuple(torch.stack([p[n] for p in pulled]).view(*out[k].shape, *args[n].shape) for n in argnums)

            return tuple(rows(k) for k in range(len(out)))

        return call


class Ours:
    """What `T` is for Tessera."""

    def __init__(self, executors: list[str] | None) -> None:
        self.executors = executors

    def __getattr__(self, name: str) -> Callable:
        return getattr(tessera, name)

    def train_step(self, *args: object, **options: object) -> Callable:
        return tessera.train_step(*args, executors=self.executors, **options)  # type: ignore[arg-type]


# --- what a program is run with ---

EAGERLY: Way = (as_written, Eager())


def ours(kind: str, made: list) -> Way:
    """How Tessera compiles a program of this kind; functions that it made are added to `made`."""
    executors = None if kind == "tile" else ["aten"]

    def jit(fn: Callable) -> Callable:
        made.append(tessera.jit(fn, executors=executors, frontend="functional" if kind == "functional" else "dynamo"))
        return made[-1]

    if kind == "backend":
        return (lambda fn: torch.compile(fn, backend="tessera", options={"executors": ["aten"]})), Ours(executors)
    return jit, Ours(executors)


def by_backend(backend: str) -> Way:
    """How a program is compiled by a backend of PyTorch's own."""

    def compiled(fn: Callable) -> Callable:
        return torch.compile(fn, backend=backend)

    return compiled, Eager(compiled)


@contextmanager
def unmerged() -> Iterator[None]:
    """Tessera leaves equal equations apart."""
    with mock.patch.dict(PIPELINES, {name: list(rows) for name, rows in PIPELINES.items()}):
        remove("cse")
        yield
