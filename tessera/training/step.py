"""`train_step`: forward, loss, backward, clipping and update as one compiled program, called like a function.

TorchDynamo captures `loss_fn(model, *batch)` whole, with its guards; the graph it hands over becomes a `Graph`, which
runs the step. Where that cannot be (a graph break, hooks on parameters, memory that overlaps) the step runs in parts
instead, with the same results: compiled forward and backward, then one compiled update, or the optimizer's own step
where hooks are registered on it. `explain` says which, and why.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
from torch.optim import optimizer as torch_optimizer

from tessera.compiled import DYNAMO_ERRORS, Backend, Compiled, GraphRecord, argument_names, compiled_state, jit
from tessera.frontends.dynamo import MODEL, capture_graph
from tessera.pipelines import Compilation, Options
from tessera.training.book import Book
from tessera.training.program import LOSS
from tessera.training.run import Graph, Settings, Updater
from tessera.util.config import config
from tessera.util.errors import CaptureError, InputError, OptionError

_UNCAPTURED = (
    *DYNAMO_ERRORS,
    torch._dynamo.exc.Unsupported,
    torch._dynamo.exc.BackendCompilerFailed,
    torch._dynamo.exc.FailOnRecompileLimitHit,
    CaptureError,
)


class StepBackend(Backend):
    """What Dynamo calls with the graph of a loss."""

    def __init__(
        self, book: Book, settings: Settings, strict: bool | None, name: str, arguments: tuple[str, ...]
    ) -> None:
        super().__init__(settings.options, strict, name, arguments)
        self.book, self.settings = book, settings

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[object], **_: object) -> Callable:
        name = f"{self.name}_{len(self.graphs)}"
        captured = capture_graph(gm, example_inputs, name, self.arguments)
        return Graph(name, captured, self.book, self.settings, self.note)

    def note(self, compilation: Compilation) -> None:
        self.graphs.append(GraphRecord(compilation.name, "", compilation))

    def refuse(self, reason: str) -> None:
        self.graphs.append(GraphRecord(f"{self.name}_{len(self.graphs)}", "", eager_reason=reason))


class TrainStep:
    """A training step: call it with a batch, it gives the loss (what `loss_fn` gave, without history)."""

    def __init__(self, loss: Callable, whole: Callable, book: Book, settings: Settings, backend: StepBackend) -> None:
        self.book, self.settings, self.backend = book, settings, backend
        self.whole = torch.compile(whole, backend=backend, fullgraph=True)
        self.parts = _Parts(loss, book, settings, backend)
        self.in_parts = ""  # why the step does not run as one program
        self.__tessera__ = Compiled(self.__call__, backend, self.__call__, _again)

    def __call__(self, *batch: object, **named: object) -> object:
        reason = self.in_parts or _hooks(self.book.optimizer)
        if reason:
            self._in_parts(reason)
            return self.parts(batch, named)
        try:
            with torch.enable_grad():
                out = self.whole(*batch, **named)
        except _UNCAPTURED as error:
            if self.backend.strict if self.backend.strict is not None else config.strict:
                raise
            self._in_parts(_reason(error))
            return self.parts(batch, named)
        self.settings.done()
        return out

    def _in_parts(self, reason: str) -> None:
        """From now on in parts. Sums of gradients that wait for an update go where autograd adds to them."""
        if self.in_parts:
            return
        self.in_parts = reason
        self.backend.refuse(f"the step runs in parts: {reason}")
        for p, total in self.book.sums.items():
            p.grad = total
        self.book.sums.clear()


class _Parts:
    """The same step, part by part."""

    def __init__(self, loss: Callable, book: Book, settings: Settings, backend: StepBackend) -> None:
        self.book, self.settings = book, settings
        options = settings.options
        self.forward = jit(
            loss, executors=options.executors, strict=backend.strict, recompute=options.recompute,
            memory_budget=options.memory_budget, offload=options.offload, frontend="dynamo",
        )  # fmt: skip
        compiled_state(self.forward).backend.graphs = backend.graphs  # type: ignore[union-attr]  # one account
        self.update = Updater(book, settings, backend.note)
        self.backend = backend
        self.own = False  # the optimizer's own step runs, since a compiled one cannot

    def __call__(self, batch: tuple, named: dict) -> object:
        settings, optimizer = self.settings, self.book.optimizer
        if settings.calls == 0:
            optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            out = self.forward(*batch, **named)
            loss = out[0] if isinstance(out, tuple) else out
            _check_loss(loss)
            (loss if settings.accumulate == 1 else loss / settings.accumulate).backward()  # type: ignore[union-attr]
        if settings.updates:
            self._update()
            if not settings.keep_grads:
                optimizer.zero_grad(set_to_none=True)
        settings.done()
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)

    def _update(self) -> None:
        if not self.own and not _optimizer_hooks(self.book.optimizer):
            try:
                return self.update()
            except CaptureError as error:
                self.own = True
                self.backend.refuse(f"the optimizer runs by itself: {_reason(error)}")
                self.book.unmake()
        if self.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.book.groups()), self.settings.clip_norm)
        self.book.optimizer.step()


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"train_step: expected the loss to be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise InputError(
            f"train_step: expected the loss to be one floating-point number, got {loss.dtype} of shape "
            f"{tuple(loss.shape)}; reduce it (sum, mean)"
        )
    if not loss.requires_grad:
        raise InputError("train_step: the loss depends on no parameter that requires grad")


def _again(*_: object) -> Callable:
    raise OptionError("a training step is not compiled again; call tessera.train_step")


def _hooks(optimizer: torch.optim.Optimizer) -> str:
    """Why autograd or the optimizer must run themselves, where they must."""
    if _optimizer_hooks(optimizer):
        return "hooks are registered on the optimizer"
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                return "hooks are registered on a parameter"
    return ""


def _optimizer_hooks(optimizer: torch.optim.Optimizer) -> bool:
    registered = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks,
    )  # fmt: skip
    return any(registered)


def _reason(error: Exception) -> str:
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).strip().splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0] if lines else ''}"


_FRAMES = """
def loss(*args, **kwargs):
    return {call}*args, **kwargs)

def step(*args, **kwargs):
    out = {call}*args, **kwargs)
    if isinstance(out, tuple):
        return (mark(out[0]), *out[1:])
    return mark(out)
"""


def _frames(model: torch.nn.Module, loss_fn: Callable | None) -> tuple[Callable, Callable]:
    """The loss as a function of a batch alone, plain and with the loss marked, each in a frame of its own."""
    scope: dict[str, object] = {MODEL: model, "loss_fn": loss_fn, "mark": LOSS}
    exec(_FRAMES.format(call=f"{MODEL}(" if loss_fn is None else f"loss_fn({MODEL}, "), scope)  # noqa: S102
    return scope["loss"], scope["step"]  # type: ignore[return-value]


def _batch_names(model: torch.nn.Module, loss_fn: Callable | None) -> tuple[str, ...]:
    names = argument_names(model if loss_fn is None else loss_fn)
    return names if loss_fn is None else names[1:]


def train_step(
    model: torch.nn.Module,
    loss_fn: Callable | None,
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    keep_grads: bool = False,
    cuda_graph: bool | str = "auto",
    executors: str | list[str] | tuple[str, ...] | None = None,
    memory_budget: str | int | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    strict: bool | None = None,
) -> TrainStep:
    """A function `step(*batch)` that trains the model on a batch and gives its loss.

    loss_fn        `loss_fn(model, *batch)` gives the loss, or a tuple that starts with it; None: the model gives it
    optimizer      torch.optim.SGD, Adam, AdamW or tessera.optim.Lion; its state and counters stay its own
    clip_norm      the norm that all gradients together are scaled down to, as clip_grad_norm_ does
    accumulate     how many calls share one update; gradients are averaged over them
    keep_grads     leave the gradients of the last update in `.grad`
    cuda_graph     replay the step as one CUDA graph: True, False, or "auto", where the host is measured to limit it
    executors, memory_budget, recompute, offload, strict  as for `jit`
    """
    if isinstance(state := compiled_state(model), Compiled):
        model = state.fn  # type: ignore[assignment]
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(f"loss_fn: expected a function of the model and a batch, or None, got {loss_fn!r}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"accumulate: expected a number of calls, at least 1, got {accumulate!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise OptionError(f"clip_norm: expected a number above 0 or None, got {clip_norm!r}")
    book = Book(optimizer)
    names = {p: name.replace(".", "_") for name, p in model.named_parameters()}
    options = Options.of(executors, recompute, memory_budget, cuda_graph, offload)
    if options.offload != "none" and cuda_graph is True:
        raise OptionError(
            "cuda_graph=True: expected a step that stays on the device, got offload='host', which copies to the host "
            "and back; leave one of the two out"
        )
    settings = Settings(options, clip_norm, accumulate, keep_grads, names)
    backend = StepBackend(book, settings, strict, type(model).__name__, _batch_names(model, loss_fn))
    return TrainStep(*_frames(model, loss_fn), book, settings, backend)
