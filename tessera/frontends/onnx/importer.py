"""Runs a graph so that a recorder around it writes a Trace.

In: the same as the interpreter, with tensors that hold nothing. Out: the same values. What is known all the same is
computed now: constants of the file and what is made of them, and arithmetic on sizes, which stays numbers. Every
equation is told which node of which file it comes from. An operator that cannot be recorded is reported with its node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tessera.frontends.functional.trace import ASKS_A_VALUE
from tessera.frontends.onnx.elements import Narrow
from tessera.frontends.onnx.interpreter import Context, Interpreter, Scope
from tessera.frontends.onnx.registry import Meaning
from tessera.frontends.onnx.sizes import Sizes, TooLarge, evaluate, known_as_sizes, of_shape
from tessera.frontends.onnx.structure import Node, subgraphs
from tessera.frontends.onnx.values import Untraceable, ValueNeeded, is_known
from tessera.ir import fake
from tessera.ir.equation import Source
from tessera.ir.record import recording
from tessera.torch_internals.fake import DynamicOutputShapeException
from tessera.util.errors import CaptureError

FOLDED = 4096  # elements of a result that is computed now rather than at every call


class Stop(Exception):
    """A node of the outermost graph that did not become equations; `needs` names the value that it asked for."""

    def __init__(self, node: Node, reason: str, needs: str = "") -> None:
        super().__init__(f"{node}: {reason}")
        self.node, self.reason, self.needs = node, reason, needs


class Importer(Interpreter):
    passed = (Exception,)  # `run_node` below says what becomes of each

    def run_node(self, node: Node, scope: Scope) -> None:
        recorder = recording()
        outermost = scope.outer is None and self.depth == 0
        if recorder is not None and outermost:
            recorder.builder.source = Source(self.model.path, node.index, note=_printable(f"{node.name} ({node.op})"))
        if not outermost:
            super().run_node(node, scope)
            return
        try:
            super().run_node(node, scope)
        except ValueNeeded as error:
            raise Stop(node, str(error), _name_of(error.value, node, scope)) from error
        except (Untraceable, TooLarge, CaptureError, DynamicOutputShapeException, *ASKS_A_VALUE) as error:
            raise Stop(node, str(error).split("\n")[0] or type(error).__name__) from error
        except Exception as error:  # the interpreter runs it: it works there, or says what is wrong
            raise Stop(node, f"{type(error).__name__}: {error}".split("\n")[0]) from error

    def apply(self, meaning: Meaning, context: Context, args: list, attributes: dict) -> Sequence[object]:
        if any(map(_holds_strings, args)):
            raise Untraceable("strings are Python values, which no program holds")
        if meaning.interpreted:
            if all(map(_small_and_known, args)) and any(a is not None for a in args):
                return self.now(meaning, context, args, attributes)
            raise Untraceable(meaning.interpreted)
        if meaning.name in ("Shape", "Size") and not meaning.domain:
            return self.shape(meaning, context, args, attributes)
        if any(isinstance(a, Sizes) for a in args):
            listed = [known_as_sizes(a) if is_known(a) else a for a in args]
            out = None if meaning.domain else evaluate(meaning.name, listed, attributes)
            if out is not None:
                return out if isinstance(out, tuple) else (out,)
            args = [_settled(a) for a in args]
        if (
            not meaning.random
            and not subgraphs(context.node)
            and all(map(_small_and_known, args))
            and any(a is not None for a in args)
        ):
            return self.now(meaning, context, args, attributes)
        args = [
            a.tensor(self.device) if isinstance(a, Sizes) and i not in meaning.sizes else a for i, a in enumerate(args)
        ]
        return self.evaluate(meaning, context, [self.placed(a) for a in args], attributes)

    def now(self, meaning: Meaning, context: Context, args: list, attributes: dict) -> Sequence[object]:
        """The results of an operator over known values."""
        with fake.alone(), torch.no_grad():
            return self.evaluate(meaning, context, args, attributes)

    def shape(self, meaning: Meaning, context: Context, args: list, attributes: dict) -> Sequence[object]:
        x = args[0]
        if isinstance(x, Sizes) or not hasattr(x, "shape"):
            return self.evaluate(meaning, context, [_settled(x)], attributes)
        sizes = list(x.shape)
        if meaning.name == "Size":
            total = 1
            for n in sizes:
                total = total * n
            return (_settled(Sizes(np.array(total, dtype=object), torch.int64)),)
        start, end = attributes.get("start", 0), attributes.get("end")
        return (_settled(of_shape(sizes[start:end])),)

    def placed(self, a: object) -> object:
        """Known tensors take part in a program where it computes."""
        if is_known(a) and isinstance(a, (torch.Tensor, Narrow)) and self.device.type != "cpu":
            return self.constant(a)
        return a

    def constant(self, x: object) -> object:
        with fake.alone():
            return super().constant(x)


def _holds_strings(a: object) -> bool:
    return any(map(_holds_strings, a)) if isinstance(a, list) else isinstance(a, np.ndarray)


def _printable(name: str) -> str:
    """A name of the file as it may stand in a comment: on one line, and short."""
    return "".join(c if c.isprintable() else "?" for c in name[:200]).strip()


def _settled(a: object) -> object:
    """Sizes that are all numbers are a known tensor."""
    if isinstance(a, Sizes) and not a.symbolic():
        with fake.alone():
            return a.tensor()
    return a


def _small_and_known(a: object) -> bool:
    if a is None:
        return True
    data = a.data if isinstance(a, Narrow) else a
    return isinstance(data, torch.Tensor) and is_known(data) and data.numel() <= FOLDED and not data.requires_grad


def _name_of(value: object, node: Node, scope: Scope) -> str:
    """What the graph calls a value, if it is an input of the node or one that a graph inside it reads."""
    for name in (*node.inputs, *(name for g in subgraphs(node) for name in g.free)):
        if name and name in scope.values:
            held = scope.values[name]
            if held is value or (isinstance(held, Narrow) and held.data is value):
                return name
    return ""
