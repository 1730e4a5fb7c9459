"""What kind of function stands behind something that is called, and which kinds are not compiled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from tessera.util.errors import OptionError


def refuse_suspended(fn: Callable, generators: bool) -> None:
    """A function that stops half-way is not one program: its caller decides when, and on what, it goes on.

    TorchDynamo lets generators run as they are; where the function is traced at once (`generators`), they are refused
    too.
    """
    called = function_behind(fn)
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        kind, advice = "an async function", "compile the functions that it calls"
    elif generators and inspect.isgeneratorfunction(called):
        kind, advice = "a generator", 'compile what computes one item, or use frontend="dynamo"'
    else:
        return
    name = getattr(called, "__qualname__", repr(called))
    raise OptionError(f"expected a function that runs to its end and gives its result, got {kind}, {name}: {advice}")


def function_behind(fn: Callable) -> Callable:
    """The function whose code runs when `fn` is called."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, torch.nn.Module):
        return fn.forward
    return fn if inspect.isroutine(fn) or isinstance(fn, type) else type(fn).__call__
