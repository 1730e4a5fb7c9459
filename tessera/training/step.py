"""`train_step`: forward, loss, backward, clipping and update as one compiled program, called like a function.

TorchDynamo captures `loss_fn(model, *batch)` whole, with its guards; the graph it hands over becomes a `Graph`, which
runs the step. Where that cannot be (a graph break, hooks on parameters, memory that overlaps) the step runs in parts
instead, with the same results: compiled forward and backward, then one compiled update, or the optimizer's own `step`
where somebody replaced it or hung hooks on it. `explain` says which, and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from numbers import Real

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from tessera.distributed.elsewhere import DTENSORS, FULLY_SHARD, elsewhere
from tessera.distributed.sharding import ask_for, check_outermost, place, sharding_of
from tessera.distributed.users_line import at_users_line
from tessera.distributed.weights import follow
from tessera.frontends.dynamo.frames import MODEL, looking_at_hooks, own_frames
from tessera.frontends.dynamo.module_hooks import ModuleHooks
from tessera.just_in_time.api import argument_names, under_dynamo
from tessera.just_in_time.compiled import Compiled, compiled_state
from tessera.pipeline.options import Options
from tessera.torch_internals.autograd import has_hooks
from tessera.torch_internals.dynamo import FailOnRecompileLimitHit, TorchDynamoException
from tessera.torch_internals.fake import active_fake_mode
from tessera.training.backend import StepBackend, reason_of
from tessera.training.methods import wants_closure
from tessera.training.optimizer_state import OptimizerState
from tessera.training.parts import Parts
from tessera.training.pipelined import PipelinedStep
from tessera.training.program import LOSS
from tessera.training.run import Settings, StepFailure
from tessera.training.sharded import ShardedStep
from tessera.transforms.fp8_recipe import FP8
from tessera.util.config import config
from tessera.util.errors import CaptureError, InputError, OptionError

_UNCAPTURED = (TorchDynamoException, FailOnRecompileLimitHit, CaptureError)


class TrainStep:
    """A training step: call it with a batch, it gives the loss (what `loss_fn` gave, without history)."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable | None,
        state: OptimizerState,
        settings: Settings,
        backend: StepBackend,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.state, self.settings, self.backend = state, settings, backend
        self.hooks: ModuleHooks[tuple[Callable, Parts]] = ModuleHooks(model)
        self.elsewhere = elsewhere(model)
        self.whole, self.parts = self._anew()
        self.in_parts = ""  # why the step does not run as one program
        if self.elsewhere is not None:
            self._say_in_parts(f"{self.elsewhere.who}: {self.elsewhere.reason}")
        self.__tessera__ = Compiled(self.__call__, backend, self.__call__, _again)

    def __repr__(self) -> str:
        return f"<TrainStep of {type(self.model).__name__} with {type(self.state.optimizer).__name__}>"

    def __call__(self, /, *batch: object, **named: object) -> object:
        if torch.is_inference_mode_enabled():
            raise InputError("train_step: expected a call outside torch.inference_mode, which makes no gradients")
        if active_fake_mode() is not None:
            raise InputError("train_step: expected a call on real tensors, got one under a FakeTensorMode")
        if self.hooks.seen != RemovableHandle.next_id or self.hooks.some:
            self._look_at_hooks()
        reason = self.in_parts or self.state.own_step() or self.state.own_zero_grad() or _hooks(self.state.optimizer)
        if not reason:
            try:
                with torch.enable_grad():
                    out = self.whole(*batch, **named)
                self.settings.done()
                return out
            except _UNCAPTURED as error:
                if self.backend.strict if self.backend.strict is not None else config.strict:
                    raise
                reason = reason_of(error)
                if isinstance(error, StepFailure):
                    message = f"Tessera could not compile the step as one program and runs it in parts: {error}"
                    warnings.warn(f"{message}. Please report this; TESSERA_STRICT=1 raises it.", stacklevel=2)
        return self._run_in_parts(reason, batch, named)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the step remembers beside the model and the optimizer: of delayed scales, the largest magnitudes of the
        last steps by layer."""
        histories = self.settings.options.histories
        return {} if histories is None else {name: history.clone() for name, history in histories.held.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on with what `state_dict` gave."""
        histories = self.settings.options.histories
        if histories is None and state:
            raise OptionError("load_state_dict: expected nothing, since the step has no delayed scales to go on with")
        if histories is not None:
            histories.load(state)

    def _anew(self) -> tuple[Callable, Parts]:
        """The step as one program and in parts; nothing is compiled yet."""
        loss, whole = _frames(self.model, self.loss_fn)
        parts = Parts(loss, self.state, self.settings, self.backend, self.elsewhere in (FULLY_SHARD, DTENSORS))
        return under_dynamo(whole, self.backend, fullgraph=True), parts

    def _look_at_hooks(self) -> None:
        """Dynamo compiles a module's hooks with it and does not see when they change: then the step begins anew."""
        changed, frames = self.hooks.changed((self.whole, self.parts))
        if changed:
            self.whole, self.parts = frames or self._anew()

    def _run_in_parts(self, reason: str, batch: tuple, named: dict) -> object:
        """From now on in parts, unless it is the loss itself that fails: the next batch may be a better one."""
        out = self.parts.loss(batch, named)
        if not self.in_parts:
            self._say_in_parts(reason)
        return self.parts.finish(out)

    def _say_in_parts(self, reason: str) -> None:
        self.in_parts = reason
        self.backend.refuse(f"the step runs in parts: {reason}")


def _again(*_: object) -> Callable:
    raise OptionError("a training step is not compiled again; call tessera.train_step")


def _hooks(optimizer: torch.optim.Optimizer) -> str:
    """Why autograd must run itself, where it must."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if has_hooks(p):
                return "hooks are registered on a parameter"
    return ""


_FRAMES = """
def loss(*args, **kwargs):
    return {call}*args, **kwargs)

def step(*args, **kwargs):
    {look}
    out = {call}*args, **kwargs)
    if isinstance(out, tuple):
        return (mark(out[0]), *out[1:])
    if isinstance(out, dict):
        out["loss"] = mark(out["loss"])
        return out
    return mark(out)
"""


def _frames(model: torch.nn.Module, loss_fn: Callable | None) -> tuple[Callable, Callable]:
    """The loss as a function of a batch alone, plain and with the loss marked, each in a frame of its own."""
    look, hooks = looking_at_hooks(model)
    scope: dict[str, object] = {MODEL: model, "loss_fn": loss_fn, "mark": LOSS, **hooks}
    frames = own_frames(_FRAMES.format(look=look, call=f"{MODEL}(" if loss_fn is None else f"loss_fn({MODEL}, "), scope)
    return frames["loss"], frames["step"]


def _of_outputs(loss_fn: Callable | None) -> bool:
    """One of PyTorch's own losses, which take what a model gave."""
    modules = (torch.nn.functional.__name__, torch.nn.modules.loss.__name__)
    return getattr(loss_fn, "__module__", "") in modules


def _batch_names(model: torch.nn.Module, loss_fn: Callable | None) -> tuple[str, ...]:
    names = argument_names(model if loss_fn is None else loss_fn)
    return names if loss_fn is None else names[1:]


def _clips(norm: float | None, value: float | None) -> dict[str, float]:
    """How gradients are clipped, in order, and to what."""
    asked = {name: limit for name, limit in (("norm", norm), ("value", value)) if limit is not None}
    for name, limit in asked.items():
        if not isinstance(limit, (Real, torch.Tensor)) or not limit > 0:
            raise OptionError(f"clip_{name}: expected a number above 0 or None, got {limit!r}")
    return {name: float(limit) for name, limit in asked.items()}


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if wants_closure(optimizer):
        raise OptionError(
            f"expected an optimizer that steps once a batch, got {type(optimizer).__name__}, whose step wants a "
            "closure to compute the loss again; compile the model with tessera.jit and call the optimizer yourself"
        )


def _check_owns(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """An optimizer of another model, or of this one before its parameters were replaced, trains nothing."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained and not any(id(p) in owned for p in trained):
        message = f"train_step: the optimizer owns no parameter of {type(model).__name__}, so no step changes the model"
        warnings.warn(f"{message}; expected torch.optim.SGD(model.parameters(), …) or the like", stacklevel=4)


@at_users_line
def train_step(
    model: torch.nn.Module,
    loss_fn: Callable | None,
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    keep_grads: bool = False,
    cuda_graph: bool | str = "auto",
    executors: str | list[str] | tuple[str, ...] | None = None,
    memory_budget: str | int | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    precision: str | FP8 | None = None,
    strict: bool | None = None,
    mesh: DeviceMesh | None = None,
    plan: str | Mapping[str, object] | None = None,
    microbatches: int | None = None,
) -> TrainStep | ShardedStep:
    """A function `step(*batch)` that trains the model on a batch and gives its loss.

    loss_fn        `loss_fn(model, *batch)` gives the loss, a tuple that starts with it or a dict with a "loss"; None:
                   the model itself gives it
    optimizer      torch.optim.SGD, Adam, AdamW, RMSprop, Adadelta, Adamax, RAdam or tessera.optim.Lion; another one
                   runs its own step after a compiled backward. State and counters stay the optimizer's
    clip_norm      the norm that all gradients together are scaled down to, as clip_grad_norm_ does
    clip_value     how far from zero an element of a gradient may be, as clip_grad_value_ does; after clip_norm
    accumulate     how many calls share one update; gradients are averaged over them, and wait in `.grad`
    keep_grads     leave the gradients of the last update in `.grad`
    cuda_graph     replay the step as one CUDA graph: True, False, or "auto", where the host is measured to limit it
    mesh, plan     shard the model at once (tessera.shard); the optimizer follows. The batch is this rank's part, the
                   loss that of the whole batch
    microbatches   how many parts a pipeline of the plan cuts a batch into; None: as many as divide its rows, at most 4
                   for each rank
    executors, memory_budget, recompute, offload, precision, strict  as for `jit`
    """
    if isinstance(compiled := compiled_state(model), Compiled):
        model = compiled.fn  # type: ignore[assignment]
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(f"loss_fn: expected a function of the model and a batch, or None, got {loss_fn!r}")
    if _of_outputs(loss_fn):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise OptionError(f"loss_fn: {name} takes no model; expected lambda model, x, y: loss(model(x), y) or the like")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"accumulate: expected a number of calls, at least 1, got {accumulate!r}")
    _check_optimizer(optimizer)
    clips = _clips(clip_norm, clip_value)
    if mesh is not None or plan is not None:
        follow(optimizer, place(model, mesh, plan, None, microbatches))
    elif (sharding := sharding_of(model)) is not None:
        ask_for(sharding, microbatches)
    else:
        check_outermost(model, "train_step")
        if microbatches is not None:
            raise OptionError("microbatches: expected a model that tessera.shard laid out with a pipeline, got another")
        _check_owns(optimizer, model)
    state = OptimizerState(optimizer)
    names = {p: name.replace(".", "_") for name, p in model.named_parameters()}
    options = Options.of(executors, recompute, memory_budget, cuda_graph, offload, precision)
    if options.offload != "none" and cuda_graph is True:
        raise OptionError(
            "cuda_graph=True: expected a step that stays on the device, got offload='host', which copies to the host "
            "and back; leave one of the two out"
        )
    settings = Settings(options, clips, accumulate, keep_grads, names)
    if (sharding := sharding_of(model)) is not None:
        kind = ShardedStep if sharding.plan.pipe is None else PipelinedStep
        return kind(model, loss_fn, state, settings, sharding)
    backend = StepBackend(state, settings, strict, type(model).__name__, _batch_names(model, loss_fn))
    return TrainStep(model, loss_fn, state, settings, backend)
