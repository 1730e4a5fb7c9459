"""The training step part by part, where it cannot be one program: compiled forward and backward, then the update.

`loss` runs the user's function on a batch, `finish` does the rest of the step on what it gave. The update is one
compiled program too, or the optimizer's own step where hooks are registered on it, or where memory is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import optimizer as torch_optimizer

from tessera.compiled import compiled_state, jit
from tessera.training.backend import StepBackend, reason_of
from tessera.training.book import Book
from tessera.training.run import Settings, Updater
from tessera.util.errors import CaptureError, InputError


class Parts:
    """Forward and backward compiled apart, then one compiled update."""

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

    def loss(self, batch: tuple, named: dict) -> object:
        """What the user's function gives for a batch."""
        with torch.enable_grad():
            out = self.forward(*batch, **named)
        _check_loss(_loss_of(out))
        return out

    def finish(self, out: object) -> object:
        """The rest of the step; gives what the caller gets."""
        settings, optimizer = self.settings, self.book.optimizer
        if settings.calls == 0:
            optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = _loss_of(out)
            (loss if settings.accumulate == 1 else loss / settings.accumulate).backward()  # type: ignore[union-attr,operator]
        if settings.updates:
            self._update()
            if not settings.keep_grads:
                optimizer.zero_grad(set_to_none=True)
        settings.done()
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)

    def _update(self) -> None:
        if not self.own and not optimizer_hooks(self.book.optimizer):
            try:
                return self.update()
            except CaptureError as error:
                self.own = True
                self.backend.refuse(f"the optimizer runs by itself: {reason_of(error)}")
                self.book.unmake()
        if self.settings.clips:
            clip = torch.nn.utils.clip_grad_norm_ if self.settings.clips == "norm" else torch.nn.utils.clip_grad_value_
            clip(list(self.book.groups()), self.settings.limit)
        self.book.optimizer.step()


@contextmanager
def handed_over(book: Book) -> Iterator[None]:
    """Sums of gradients that wait for an update go where autograd adds to them; they stay where the loss fails."""
    waiting = dict(book.sums)
    for p, total in waiting.items():
        p.grad = total
    book.sums.clear()
    try:
        yield
    except BaseException:
        book.sums.update(waiting)
        for p in waiting:
            p.grad = None
        raise


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


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> bool:
    registered = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks,
    )  # fmt: skip
    return any(registered)
