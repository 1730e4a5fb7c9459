"""What TorchDynamo calls with the graph of a loss, and the account of what became of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch

from tessera.frontends.dynamo.graphs import capture_graph, counted, fed
from tessera.frontends.dynamo.lines import is_library
from tessera.just_in_time.backend import Backend, GraphRecord
from tessera.pipeline.compilation import Compilation
from tessera.torch_internals.dynamo import FailOnRecompileLimitHit
from tessera.training.optimizer_state import OptimizerState
from tessera.training.run import Graph, Settings


class StepBackend(Backend):
    """What Dynamo calls with the graph of a loss."""

    def __init__(
        self,
        state: OptimizerState,
        settings: Settings,
        strict: bool | None,
        name: str,
        arguments: tuple[str, ...],
    ) -> None:
        super().__init__(settings.options, strict, name, arguments)
        self.state, self.settings = state, settings

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[object], **_: object) -> Callable:
        record = self.begin()
        record.repeats = counted(gm)[1]
        captured = capture_graph(gm, example_inputs, record.name, self.arguments)

        def note(compilation: Compilation) -> None:
            """A graph has a program for every kind of step; Dynamo's reason is that of the first."""
            self.graphs.append(dataclasses.replace(record, name=compilation.name, compilation=compilation))
            record.recompile_reason = ""

        return fed(Graph(record.name, captured, self.state, self.settings, note), gm)

    def note(self, compilation: Compilation) -> None:
        self.graphs.append(GraphRecord(compilation.name, "", compilation))

    def refuse(self, reason: str) -> None:
        self.graphs.append(self.next_record(eager_reason=reason))


def reason_of(error: Exception) -> str:
    """What stood in the way, what PyTorch advises, and the user's innermost line, as far as the error tells."""
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, FailOnRecompileLimitHit):  # says only that it fails; its cause says why
        inner = inner.__cause__ or inner
    text = str(inner).strip()
    hints = re.findall(r"^ *Hint: *(.+)$", text, re.MULTILINE)
    lines = re.findall(r'File "([^"<]+)", line (\d+)', text.partition("from user code:")[2])
    parts = [f"{type(inner).__name__}: {text.splitlines()[0].strip() if text else ''}"]
    parts += [f"at {file}:{line}" for file, line in lines if not is_library(file)][-1:] or [
        f"at {file}:{line}" for file, line in lines[-1:]
    ]
    return "; ".join([*parts, *hints[:1]])
