"""Runs a program by eager PyTorch and by Tessera, and says what differs.

Where TorchDynamo differs from eager by itself, with a backend that changes nothing, the program is `dynamo`'s. Where
eager refuses a gradient because something was written that it needs, the program is `written`: a functional program
need not refuse. So it is where a compiled graph is refused so because it saves something else than eager, or hides
fewer writes: but only if AOTAutograd's graph is, too; or because of a checkpoint that would run again on something else
than it ran on, which eager does without a word. `node` are hooks that see something else because a compiled graph
is one node to autograd: AOTAutograd's shows them the same; and full backward hooks of a module that hand on zeros, or
None to a function that makes zeros of it, where nothing differs without them. `refused` is what functional tracing
says it does not take, `beyond` what torch.func does not do, or does otherwise than a loop over the examples.
"""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.utils._pytree import tree_map

import tessera
from tessera.torch_internals.autograd import unpacks_one_by_one
from tessera.util.errors import CaptureError

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
    outcome: str  # same · wrong · dynamo · written · node · refused · beyond · invalid
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
        return Verdict("invalid", "eager lacks a kernel for what nobody reads")
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
    if kind == "functional" and isinstance(ours.error, CaptureError):
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
    if kind == "transform" and ".data" in text:  # there it hides a write from the innermost transform alone
        hidden = run(text.replace(".data", ".detach()"), lambda fn: fn, Eager())
        if not compared(hidden, ours, text, kind):
            return Verdict("beyond", reason, **about)
    if kind in UNDER_DYNAMO:
        plain = run(text, *others_way("eager"))
        if compared(eager, plain, text, kind):
            return Verdict("dynamo", reason, **about)
    return Verdict("wrong", reason, **about)


def _lacks_kernel(error: BaseException | None) -> bool:
    return isinstance(error, NotImplementedError) or "not implemented for complex tensors" in str(error)


def without_module_hooks(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if "register_full_backward" not in line)


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
