"""The training step part by part, where it cannot be one program: compiled forward and backward, then the update.

`loss` runs the user's function on a batch, `finish` does the rest of the step on what it gave. The update is one
compiled program too, or the optimizer's own `step` where equations cannot stand for it (`OptimizerState.own_step`), or
where memory is shared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.just_in_time.api import jit
from tessera.just_in_time.compiled import compiled_state
from tessera.torch_internals.pytree import tree_map_only
from tessera.training.backend import StepBackend, reason_of
from tessera.training.optimizer_state import OptimizerState
from tessera.training.run import Settings, Updater
from tessera.util.errors import CaptureError, InputError


class Parts:
    """Forward and backward compiled apart, then one compiled update."""

    def __init__(
        self, loss: Callable, state: OptimizerState, settings: Settings, backend: StepBackend, by_itself: bool = False
    ) -> None:
        """`by_itself`: parameters are such that only the optimizer's own step updates them."""
        self.state, self.settings = state, settings
        options = settings.options
        self.forward = jit(
            loss, executors=options.executors, strict=backend.strict, recompute=options.recompute,
            memory_budget=options.memory_budget, offload=options.offload,
            precision=options.precision, frontend="dynamo",
        )  # fmt: skip
        own = compiled_state(self.forward).backend  # type: ignore[union-attr]
        own.graphs, own.options = backend.graphs, options  # one account, one history of scales
        self.update = Updater(state, settings, backend.note)
        self.backend = backend
        self.own = by_itself  # the optimizer's own step runs, since a compiled one cannot

    def loss(self, batch: tuple, named: dict) -> object:
        """What the user's function gives for a batch."""
        with torch.enable_grad():
            out = self.forward(*batch, **named)
        _check_loss(_loss_of(out))
        return out

    def finish(self, out: object) -> object:
        """The rest of the step; gives what the caller gets."""
        settings, optimizer = self.settings, self.state.optimizer
        if settings.calls == 0:
            optimizer.zero_grad()
        with torch.enable_grad():
            loss = _loss_of(out)
            (loss if settings.accumulate == 1 else loss / settings.accumulate).backward()  # type: ignore[union-attr,operator]
        if settings.updates:
            self._update()
            if not settings.keep_grads and not self.state.own_zero_grad():  # who wrote one may want gradients to stay
                self.state.drop_grads()
        settings.done()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, out)

    def _update(self) -> None:
        if not self.own and not self.state.own_step():
            try:
                return self.update()
            except CaptureError as error:
                self.own = True
                self.backend.refuse(f"the optimizer runs by itself: {reason_of(error)}")
                self.state.unmake()
        for how, limit in self.settings.clips.items():
            clip = torch.nn.utils.clip_grad_norm_ if how == "norm" else torch.nn.utils.clip_grad_value_
            clip(list(self.state.groups()), limit)
        self.state.optimizer.step()


def _loss_of(out: object) -> object:
    """As the step that is one program finds it."""
    return out[0] if isinstance(out, tuple) else out.get("loss") if isinstance(out, dict) else out


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"train_step: expected the loss to be a tensor, got {type(loss).__name__}; give the loss, a tuple that "
            'starts with it, or a dict that has it as "loss"'
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise InputError(
            f"train_step: expected the loss to be one floating-point number, got {loss.dtype} of shape "
            f"{tuple(loss.shape)}; reduce it (sum, mean)"
        )
    if not loss.requires_grad:
        raise InputError("train_step: the loss depends on no parameter that requires grad")
