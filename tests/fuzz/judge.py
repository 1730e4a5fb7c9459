"""Runs a program by eager PyTorch and by Tessera, and says what differs.

Where TorchDynamo differs from eager by itself, with a backend that changes nothing, the program is `dynamo`'s. Where
eager refuses a gradient because something was written that it needs, the program is `written`: a functional program
need not refuse. So it is where a compiled graph is refused so because it saves something else than eager, or hides
fewer writes: but only if AOTAutograd's graph is, too; or because of a checkpoint that would run again on something else
than it ran on, which eager does without a word. `node` are hooks that see something else because a compiled graph
is one node to autograd: AOTAutograd's shows them the same; and full backward hooks of a module that hand on zeros, or
None to a function that makes zeros of it, where nothing differs without them. `merged` are gradients at infinities
that are eager's where equal equations stay apart: one of them is differentiated for all, by a sum of cotangents.
`refused` is what functional tracing says it does not take, and second derivatives that need an input which is no leaf
and which nothing kept (docs/training.md). `beyond` is what torch.func does not do, or does otherwise than a loop over
the examples, or than its own grad; and tangents that it gives in another dtype than what moves.
"""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.utils._pytree import tree_map

import tessera
from tessera.pipeline.lists import PIPELINES, remove
from tessera.torch_internals.autograd import unpacks_one_by_one
from tessera.util.errors import CaptureError, DoubleBackwardError

from .observe import ALL, EXACT, Observer, Sight, difference
from .prelude import NAMES
from .switches import reset_switches, switches

if "tessera" not in torch._dynamo.list_backends():  # the package is not installed, which registers it
    torch._dynamo.register_backend(tessera.backend, "tessera")

UNDER_DYNAMO = ("jit", "tile", "backend", "second", "transform", "train")

SECOND = "backward through the graph a second"  # a graph that saved nothing is not refused by eager
# Autograd's own book-keeping refuses these; a functional program has no such book.
REFUSALS = (
    "modified by an inplace operation",
    SECOND,
    "A view was created in no_grad mode",
    "is a view of a view which was created in no_grad mode",
    "is a view and is being modified inplace",
    "is a view and its base or another view of its base has been modified inplace",
)
# What torch.func does not do.
MISSING = (
    "override the setup_context",
    "don't yet support saved tensor hooks",
    "vmap: ",
    "under vmap transform",
    "Batching rule not implemented",
    "more than one element of the written-to tensor",
    "don't support automatic differentiation",
    "ZeroTensors are immutable",
    "because it is an out= function",
    "of tensors does not require grad and does not have a grad_fn",  # of a view made under no_grad
    "You tried to vmap over _NoopSaveInput",  # checkpoint, before 2.12
)
# The same of a write under vmap, in the words of whatever kernel first meets the batch.
UNBATCHED = "doesn't match the broadcast shape"


@dataclass
class Ran:
    sights: list[Sight]
    error: BaseException | None
    complaints: list[str]  # what Tessera asks its users to report
    left: dict[str, object]  # switches of PyTorch that stand otherwise than before


@dataclass(frozen=True)
class Verdict:
    outcome: str  # same · wrong · dynamo · written · node · merged · refused · beyond · invalid
    reason: str = ""
    raised: bool = False  # eager refuses the program
    graphs: int = 0  # compiled
    eager: int = 0  # graphs that ran eagerly


class Eager:
    """What `T` is for eager PyTorch; `compiled` compiles the loss of a training step by somebody else."""

    def __init__(self, compiled: Callable = lambda fn: fn) -> None:
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


def run(text: str, compiled: Callable, T: object) -> Ran:  # noqa: N803
    torch._dynamo.reset()
    torch.manual_seed(0)  # of programs that draw and set none
    observer = Observer()
    scope = NAMES | {"compiled": compiled, "see": observer.see, "T": T}
    error = None
    before = switches()
    linecache.cache["<program>"] = (len(text), None, text.splitlines(keepends=True), "<program>")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(text, "<program>", "exec"), scope)
            scope["scenario"]()  # type: ignore[operator]
        except Exception as raised:  # whatever it is, the other run must do the same
            error = raised
    left = {name: now for name, now in switches().items() if now != before[name]}
    reset_switches()
    complaints = [str(w.message) for w in caught if "Please report" in str(w.message)]
    return Ran(observer.sights, error, complaints, left)


def ways(kind: str, made: list) -> tuple[Callable, object]:
    """How Tessera compiles a program of this kind; functions that it made are added to `made`."""
    executors = None if kind == "tile" else ["aten"]

    def jit(fn: Callable) -> Callable:
        made.append(tessera.jit(fn, executors=executors, frontend="functional" if kind == "functional" else "dynamo"))
        return made[-1]

    if kind == "backend":
        return (lambda fn: torch.compile(fn, backend="tessera", options={"executors": ["aten"]})), Ours(executors)
    return jit, Ours(executors)


def others_way(backend: str) -> tuple[Callable, Eager]:
    """How a program is compiled by a backend of PyTorch's own."""

    def compiled(fn: Callable) -> Callable:
        return torch.compile(fn, backend=backend)

    return compiled, Eager(compiled)


def judge(text: str, kind: str) -> Verdict:
    eager = run(text, lambda fn: fn, Eager())
    if isinstance(eager.error, NameError | SyntaxError | UnboundLocalError):
        return Verdict("invalid", repr(eager.error))
    made: list = []
    ours = run(text, *ways(kind, made))
    if _lacks_kernel(eager.error) and ours.error is None:
        return Verdict("invalid", "eager lacks a kernel, or the real part of a gradient")
    graphs, given_up = counted(made)
    reason = compared(eager, ours, text, kind)
    about = {"raised": eager.error is not None, "graphs": graphs, "eager": given_up}
    if not reason:
        return Verdict("same", **about)
    if books_refuse(eager) or SECOND in str(ours.error):
        return Verdict("written", reason, **about)
    if (
        books_refuse(ours) and not unpacks_one_by_one
    ):  # that PyTorch looks at all that was saved, also at what is not read
        return Verdict("written", reason, **about)
    if books_refuse(ours) or ": hook" in reason:
        saving = "aot_eager_decomp_partition" if kind == "tile" else "aot_eager"  # the former recomputes, as tile does
        with torch._functorch.config.patch(donated_buffer=False):  # it refuses to run backward twice otherwise
            others = run(text, *others_way(saving))
        if books_refuse(ours) and books_refuse(others):
            return Verdict("written", reason, **about)
        if not books_refuse(ours) and not compared(others, ours, text, kind):
            return Verdict("node", reason, **about)
    if books_refuse(ours) and "checkpoint(" in text and same_with(text.replace("checkpoint(", "called("), kind):
        return Verdict("written", reason, **about)
    absent = "grad: expected None" in reason or ("grad: expected" in reason and "got None" in reason)
    if absent and "register_full_backward" in text and same_with(without_module_hooks(text), kind):
        return Verdict("node", reason, **about)
    if "special=True" in text and "grad: expected" in reason and not compared(eager, unmerged(text, kind), text, kind):
        return Verdict("merged", reason, **about)
    if kind == "functional" and isinstance(ours.error, CaptureError):
        return Verdict("refused", reason, **about)
    finite = text.replace(", special=True", "")
    if kind == "second" and "prod(" in text and finite != text and same_with(finite, kind):
        return Verdict("beyond", reason, **about)  # what may be differentiated again is as in torch.func.grad
    ahead = any(name in text for name in ("T.jvp", "T.jacfwd", "T.hessian"))
    if kind == "transform" and ahead and finite != text and same_with(finite, kind):
        return Verdict("beyond", reason, **about)  # eager makes zeros of tangents that are not there
    if kind == "second" and isinstance(ours.error, DoubleBackwardError) and "contents of the input" in reason:
        return Verdict("refused", reason, **about)
    missing = (*MISSING, UNBATCHED) if "T.vmap" in text else MISSING
    if kind == "transform" and any(words in str(eager.error) for words in missing):
        return Verdict("beyond", reason, **about)
    if kind == "transform" and "T.vmap" in text:
        looped = run(text, lambda fn: fn, Looped())
        if books_refuse(looped) and ours.error is None:
            return Verdict("written", reason, **about)
        if not compared(looped, ours, text, kind):
            return Verdict("beyond", reason, **about)
    if kind == "transform":
        others = [Typed()] * ("dtype: expected" in reason) + [Pulled()] * ("prod(" in text)
        if not all(compared(run(text, lambda fn: fn, way), ours, text, kind) for way in others):
            return Verdict("beyond", reason, **about)
    if kind == "transform" and ".data" in text:  # there it hides a write from the innermost transform alone
        hidden = run(text.replace(".data", ".detach()"), lambda fn: fn, Eager())
        if not compared(hidden, ours, text, kind):
            return Verdict("beyond", reason, **about)
    unread = isinstance(eager.error, IndexError) and ours.error is None  # of indices nobody reads with
    if unread and not compared(run(text, *others_way("aot_eager")), ours, text, kind):
        return Verdict("beyond", reason, **about)
    if "relu" in text and same_with(without_negative_zeros(text), kind):  # relu(-0.0) is either zero, as vectors end
        return Verdict("beyond", reason, **about)
    if kind in UNDER_DYNAMO:
        plain = run(text, *others_way("eager"))
        if compared(eager, plain, text, kind):
            return Verdict("dynamo", reason, **about)
    return Verdict("wrong", reason, **about)


def _lacks_kernel(error: BaseException | None) -> bool:
    """For what nobody reads, or for the gradient by a real number that is written among complex ones."""
    words = ("not implemented for complex tensors", "Expected isFloatingType(grad.scalar_type())")
    return isinstance(error, NotImplementedError) or any(w in str(error) for w in words)


def without_module_hooks(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if "register_full_backward" not in line)


def without_negative_zeros(text: str) -> str:
    return text.replace(".relu_()", ".add_(0.0).relu_()").replace("F.relu(", "F.relu(0.0 + ")


def unmerged(text: str, kind: str) -> Ran:
    """What Tessera gives where equal equations stay apart."""
    with mock.patch.dict(PIPELINES, {name: list(rows) for name, rows in PIPELINES.items()}):
        remove("cse")
        return run(text, *ways(kind, []))


def same_with(text: str, kind: str) -> bool:
    """Whether another program, made of the one at hand, gives what eager gives."""
    return not compared(run(text, lambda fn: fn, Eager()), run(text, *ways(kind, [])), text, kind)


def books_refuse(ran: Ran) -> bool:
    return any(words in str(ran.error) for words in REFUSALS)


def counted(made: list) -> tuple[int, int]:
    """Graphs that were compiled, and those that run eagerly."""
    compiled = given_up = 0
    for fn in made:
        state = fn.__tessera__
        compiled += len(state.compilations())
        given_up += sum(bool(g.eager_reason) and g.nodes > 0 for g in getattr(state.backend, "graphs", ()))
    return compiled, given_up


def compared(eager: Ran, other: Ran, text: str, kind: str) -> str:
    grain = 0.05 if "bf16" in text else 1e-4 if "f32" in text or "torch.ones(" in text else 1e-8
    if reason := difference(eager.sights, other.sights, grain, EXACT.get(kind, ALL)):
        return reason
    if eager.error is None and other.error is not None:
        return f"raised {type(other.error).__name__}: {first_line(other.error)}"
    if eager.error is not None and other.error is None:
        return f"expected {type(eager.error).__name__}: {first_line(eager.error)}; nothing was raised"
    if len(eager.sights) != len(other.sights):
        late = len(other.sights) - len(eager.sights)
        return f"expected {eager.error!r}, got {other.error!r} {late} sights later"
    if eager.left != other.left:
        return f"left: expected {eager.left}, got {other.left}"
    if other.complaints:
        return f"gave up: {other.complaints[0]}"
    return ""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
