"""Fake tensors: tensors with a type and no data, on which programs are recorded and types are inferred."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tessera.torch_internals.dispatch import BelowAutograd, ModeKey, disable_current_modes, dispatch_mode
from tessera.torch_internals.lookup import symbol

_HOME = "torch._subclasses.fake_tensor"
_DATA = "saying that a program asks for the value of a tensor"
if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
else:
    FakeTensor = symbol(f"{_HOME}.FakeTensor", "recording programs without data")
    FakeTensorMode = symbol(f"{_HOME}.FakeTensorMode", "recording programs without data")
    DataDependentOutputException = symbol(f"{_HOME}.DataDependentOutputException", _DATA)
    DynamicOutputShapeException = symbol(f"{_HOME}.DynamicOutputShapeException", _DATA)

LOGGER = _HOME  # the name under which it logs
unset_fake_temporarily = symbol(f"{_HOME}.unset_fake_temporarily", "working on real tensors while a program is traced")
without_cache = symbol(f"{_HOME}.disable_fake_tensor_cache", "types that are remembered elsewhere")
detect_fake_mode = symbol("torch._guards.detect_fake_mode", "finding the mode that a program's fake tensors live in")
# The fake mode that a user has entered, if any.
active_fake_mode = partial(dispatch_mode, ModeKey.FAKE)


_as_meta = symbol(f"{_HOME}.in_kernel_invocation_manager", "views of fake tensors")


def shown_as(x: FakeTensor, shape: Sequence, stride: Sequence, offset: Any) -> FakeTensor:
    """A view of the memory of `x`."""
    mode, device = x.fake_mode, x.device
    env = mode.shape_env
    with disable_current_modes(), BelowAutograd(), nullcontext() if env is None else env.suppress_guards():
        with _as_meta(mode):
            view = torch.as_strided(x, shape, stride, offset)
        return FakeTensor(mode, view, device)


def forget_tensors(mode: FakeTensorMode) -> None:
    """Let go of the real tensors that fake ones were made of. PyTorch swaps no tensor that has a weak reference."""
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
