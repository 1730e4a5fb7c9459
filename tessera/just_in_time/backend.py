"""What TorchDynamo calls with each graph, and the record of every graph that it handed over."""

from __future__ import annotations

import dataclasses
import time
import traceback
import warnings
import weakref
from collections.abc import Callable

import torch

from tessera.frontends.dynamo.blocks import Blocks
from tessera.frontends.dynamo.breaks import why_it_ended
from tessera.frontends.dynamo.changing_numbers import make_dynamic
from tessera.frontends.dynamo.graphs import capture_graph, counted, eager_of, fed, given_fakes
from tessera.frontends.dynamo.lines import calling_line
from tessera.pipeline.compilation import Compilation, Failure, compile_captured
from tessera.pipeline.options import Options
from tessera.torch_internals import dynamo
from tessera.torch_internals.dynamo import CompileContext
from tessera.util.config import config
from tessera.util.errors import CaptureError


@dataclasses.dataclass
class GraphRecord:
    """One graph that Dynamo handed over."""

    name: str
    compile_id: str
    compilation: Compilation | None = None
    eager_reason: str = ""  # why the graph runs eagerly, where it does
    break_reason: str = ""
    break_line: str = ""
    nodes: int = 0
    called_at: str = ""  # the user's line whose call made Dynamo compile this
    recompile_reason: str = ""  # why Dynamo compiled once more, where it did: the guard that failed
    repeats: int = 0  # calls of blocks that equal another one, which was traced for them
    # blocks that were traced by themselves though others look alike, and why
    blocks: dict[str, str] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None  # what `reproduce` writes down, where a pass failed
    made: float = dataclasses.field(default_factory=time.time)


class Backend:
    """What TorchDynamo calls with each graph."""

    def __init__(
        self, options: Options, strict: bool | None = None, name: str = "graph", arguments: tuple[str, ...] = ()
    ) -> None:
        self.options, self.strict, self.name, self.arguments = options, strict, name, arguments
        self.graphs: list[GraphRecord] = []
        self.changed: set[str] = set()  # integer attributes of the model that have changed
        self.blocks = Blocks()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[object], **_: object) -> Callable:
        record = self.begin()
        record.nodes, record.repeats = counted(gm)
        record.break_reason, record.break_line = why_it_ended(gm)
        self.graphs.append(record)
        if not record.nodes:
            record.eager_reason = "the graph has no operators"
            return gm.forward
        if given_fakes(gm):
            record.eager_reason = "the inputs are fake tensors, which only PyTorch's own operators take"
            return gm.forward
        try:
            captured = capture_graph(gm, example_inputs, record.name, self.arguments)
            eager = eager_of(gm, len(example_inputs))
            call, record.compilation = compile_captured(captured, eager, record.name, self.options)
            return fed(call, gm)
        except Exception as error:
            record.failure = getattr(error, "tessera_failure", None)
            return self.run_eagerly(gm, record, error)

    def begin(self) -> GraphRecord:
        """A record of the graph that Dynamo hands over now, with what it says of it."""
        compile_id, reason = str(CompileContext.current_compile_id()), _recompile_reason()
        make_dynamic(reason, self.changed)
        about = self.next_record(compile_id, called_at=calling_line(), recompile_reason=reason)
        about.blocks = self.blocks.taken()
        return about

    def next_record(self, compile_id: str = "", **about: str) -> GraphRecord:
        """What there is to say of one graph more, under a name that no other has."""
        return GraphRecord(f"{self.name}_{len(self.graphs)}", compile_id, **about)  # type: ignore[arg-type]

    def run_eagerly(self, gm: torch.fx.GraphModule, record: GraphRecord, error: Exception) -> Callable:
        """Correct without us: this one graph runs as eager PyTorch does."""
        expected = isinstance(error, CaptureError)
        if self.strict if self.strict is not None else config.strict:
            raise error
        record.eager_reason = f"{type(error).__name__}: {error}".split("\n")[0]
        if not expected:
            place = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(
                f"Tessera could not compile {record.name} and runs it eagerly: {record.eager_reason} "
                f"(in {place.name}, {place.filename.rsplit('/', 1)[-1]}:{place.lineno}). "
                "Please report this with the script that tessera.reproduce(fast, 'repro.py') or, on the command line, "
                "`tessera repro script.py` writes; TESSERA_STRICT=1 raises it.",
                stacklevel=2,
            )
        return gm.forward


def _recompile_reason() -> str:
    """Why Dynamo compiles the frame at hand again; empty at a first time. It forgets soon, so this is asked at once."""
    return dynamo.recompile_reason()


class Handle:
    """What Dynamo gets in a backend's place. It keeps every backend for good, and a backend knows a whole model."""

    def __init__(self, backend: Backend) -> None:
        self.backend = weakref.ref(backend)  # held by what `jit` gave, without which nothing is compiled

    @property
    def blocks(self) -> Blocks | None:
        backend = self.backend()
        return None if backend is None else backend.blocks

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[object], **more: object) -> Callable:
        backend = self.backend()
        assert backend is not None, "a graph is compiled for a function that is gone"
        return backend(gm, example_inputs, **more)
