"""The fake mode in which a finished trace's types can be inferred again.

A trace does not carry the mode it was recorded in; its symbolic sizes carry their shape environment, and that
is all that inference needs. A trace with no symbols uses the default mode.
"""

from __future__ import annotations

import weakref

import torch

from tessera.ir import fake
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, TensorType
from tessera.torch_internals import shapes
from tessera.torch_internals.fake import FakeTensorMode

_modes: weakref.WeakKeyDictionary[shapes.ShapeEnv, FakeTensorMode] = weakref.WeakKeyDictionary()


def mode_of(trace: Trace) -> FakeTensorMode:
    """A fake mode with the shape environment that the trace's symbols belong to."""
    env = shape_env_of(trace)
    if env is None:
        return fake.default_mode()
    if env not in _modes:
        _modes[env] = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    return _modes[env]


def shape_env_of(trace: Trace) -> shapes.ShapeEnv | None:
    # Whatever an equation mentions is bound: with no table, only the types of inputs may speak of symbols.
    for v in trace.values() if trace.symbols else trace.inputs:
        if isinstance(v.type, TensorType):
            for size in (*v.type.shape, *v.type.stride):
                if isinstance(size, torch.SymInt):
                    return size.node.shape_env
    for eqn in trace.equations if trace.symbols else ():
        for a in eqn.args:
            for item in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(item, SYMBOLIC):
                    return item.node.shape_env
    return None
