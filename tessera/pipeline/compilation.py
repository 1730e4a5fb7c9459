"""One captured graph, compiled: what is called, and the account of how it was made.

In: a `Captured` and options. Out: a `Compilation`, whose `executable` runs. It is read from the disk where another
process compiled the same; then the account is made once somebody asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

import torch

from tessera.frontends.captured import Captured
from tessera.ir import fake
from tessera.ir.aliased import Aliased
from tessera.ir.serial import Writer
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.clean.known import Given
from tessera.passes.memory.schedule import schedule
from tessera.pipeline.account import Account, Program
from tessera.pipeline.executable import Ends, Executable, finished
from tessera.pipeline.lists import PIPELINES, cleaned, editable
from tessera.pipeline.options import Options
from tessera.pipeline.repeated import Compiled, compiled
from tessera.pipeline.run import Edits, Run
from tessera.pipeline.stage import BACKWARD, FORWARD, PROGRAM, Stage
from tessera.runtime.double_backward import Derivative, Wanted, no_forward_mode
from tessera.runtime.linked import Level
from tessera.runtime.plan import backward_graph
from tessera.store.key import Key, check_executors, key_of, own_function
from tessera.store.layout import read_layout, write_layout
from tessera.store.program import (
    COUNTS,
    FAULTS,
    Part,
    Stored,
    load,
    read_bridge,
    save,
    write_bridge,
)
from tessera.torch_internals.autograd import set_grad_enabled
from tessera.torch_internals.dynamo import compile_lock
from tessera.util.config import config, override
from tessera.util.errors import Unserial
from tessera.util.garbage import collection_paused
from tessera.util.log import log
from tessera.util.units import counted

# Told of every compilation when it is built; whoever measures a script looks on here. Empty otherwise.
WATCHERS: list[Callable[[Compilation], None]] = []


class Compilation:
    """A captured graph, what runs in its place, and how that was made."""

    kinds: tuple[str, ...] = ("inference", "training")  # the pipelines it may go through
    shortens = True  # of equal layers a few are compiled, where no one looks at the stages
    executable: Executable
    programs: list[Program]  # as they were built

    def __init__(
        self, name: str, captured: Captured, eager: Callable, options: Options, given: tuple[Given, ...] = ()
    ) -> None:
        """`given`: values that are known when the program begins, because others computed them."""
        self.name, self.captured, self.eager, self.options, self.given = name, captured, eager, options, given
        self.grad = torch.is_grad_enabled() or (captured is not None and captured.enables_grad)
        self.edits: Edits = {}
        self.flags = {field.name: getattr(config, field.name) for field in fields(config)}
        self._account: Account | None = None
        self._stretched: Compiled | None = None  # made of what was compiled for few of its layers
        self.seconds = 0.0
        key = self.key()
        if key is None or not self.load(key):
            self.compile(key)
        for tell in WATCHERS:
            tell(self)

    @property
    def account(self) -> Account:
        """How it was made. Of a program from the disk, or made of few layers, that is found out now: every layer goes
        through every stage. What runs stays as it is."""
        if self._account is None:
            with override(**self.flags):
                stretched = self._stretched or self.stretched(self.captured, self.edits)
                self._account = self.through(self.captured, self.edits)[1]
            if stretched is not None:  # it may save in another order
                self._account.run_by(_programs(stretched), stretched.kept)
        return self._account

    # --- building ---

    def compile(self, key: Key | None) -> None:
        """Build, and keep what was built where there is a key for it."""
        self.build(self.captured, {})
        if key is not None:
            self.try_to_store(key)
        count = sum(len(p.trace.equations) for p in self.programs)
        log(1, f"{self.name}: {counted(count, 'equation')}, {self.seconds:.2f} s to compile")

    def build(self, captured: Captured, edits: Edits) -> None:
        """Compile. Where that fails, what was there before goes on."""
        start = time.perf_counter()
        account: Account | None = None
        with collection_paused():
            stretched = self.stretched(captured, edits)
            if stretched is None:
                executable, account = self.through(captured, edits)
                programs = account.programs
            else:
                programs = _programs(stretched)
                executable = self.assemble(programs, stretched.ends, captured)
        self.captured, self.edits, self.executable, self._account = captured, edits, executable, account
        self.programs, self._stretched = programs, stretched
        self.from_cache, self.seconds = False, time.perf_counter() - start

    def stretched(self, captured: Captured, edits: Edits) -> Compiled | None:
        """The programs of all layers, made of those of a few; None where every layer has to be compiled, or where
        somebody wants to see that: passes and executors of a user's may look at whatever they like."""
        options = self.options
        everywhere = options.memory_budget is not None or options.offload != "none" or options.precision is not None
        if not self.shortens or edits or self.given or everywhere or _every_stage():
            return None
        try:
            self.identity()
            check_executors(options.executors)
        except Unserial:
            return None
        return compiled(self.name, captured, self.few_layers)

    def few_layers(self, captured: Captured) -> Compiled:
        run = Run(self.name, captured, self.options, self.grad, (), {})
        run.go()
        names = (PROGRAM,) if run.kind == run.plain_kind else (FORWARD, BACKWARD)
        # The forward in the order in which it runs: as it was split, what only backward reads stands at its end.
        kept = None if run.account.kept is None else (schedule(run.account.kept[0]), run.account.kept[1])
        return Compiled(tuple(run.traces[name] for name in names), run.ends(), kept)

    def through(self, captured: Captured, edits: Edits) -> tuple[Executable, Account]:
        """The graph through its pipeline."""
        run = Run(self.name, captured, self.options, self.grad, self.given, edits)
        run.go()
        run.account.programs = run.programs()
        return self.assemble(run.account.programs, run.ends(), captured), run.account

    def assemble(self, programs: list[Program], ends: Ends, captured: Captured) -> Executable:
        return Executable(programs, ends, self.eager, self.options, self.derivative, captured.enables_grad)

    def derivative(self, wanted: Wanted, again: bool, level: Level | None) -> Derivative:
        """The backward as a graph that can be differentiated in turn, if `again` is true; `wanted` says by which
        cotangents, and which are missing (None). With a level, of its results by what they are made of."""
        name, flags, bridge = f"{self.name}_again", {"dump": "", **self.flags}, self.executable.ends.bridge
        with compile_lock, fake.alone(), torch.enable_grad(), override(**flags):
            account = self.account
            assert account.core is not None and account.kept is not None and bridge is not None
            captured, given, cotangents = backward_graph(
                self.captured, account.core, bridge, account.kept, wanted, again, level, name, bool(self.edits)
            )
            second = Compilation(name, captured, no_forward_mode, self.options, (*self.given, given)).executable
        inputs = captured.trace.inputs
        devices = tuple(v.type.device if isinstance(v.type, TensorType) else None for v in inputs)
        return Derivative(second.call, second.reads, tuple(v.name for v in inputs), devices, cotangents)

    def edit(self, stage: str, trace: Trace, aliased: dict[int, Aliased] | None = None) -> None:
        """Use another program from this stage on. Edits of later stages go: they were made of what this replaces.

        `aliased`: of another captured program, the outputs that are made from inputs and other outputs still.
        """
        captured = self.captured
        if aliased is not None:  # what the new program computes lies in memory of its own
            captured = replace(captured, trace=trace, aliased=aliased, placed={})
        titles = editable()
        earlier = titles[: titles.index(stage)] if stage in cleaned() else titles
        kept = {name: program for name, program in self.edits.items() if name in earlier}
        self.build(captured, kept | {stage: trace})

    # --- programs kept on disk ---

    def key(self) -> Key | None:
        """What a stored program would be found by; None where there can be none, or where every stage is wanted."""
        if not config.program_cache or _every_stage():
            return None
        if self.given or self.options.histories is not None:  # they would belong to the key
            return None
        try:
            return key_of(self.captured, self.options.executors, self.identity())
        except FAULTS as reason:  # whatever is wrong, nothing is kept; what was compiled runs
            log(1, f"{self.name}: not kept on disk: {_told(reason)}")
            return None

    def identity(self) -> dict[str, object]:
        """What this is made from besides the captured program, as data. Users may add rows to the pipelines."""
        stages = [row for kind in self.kinds for row in PIPELINES[kind] if isinstance(row, Stage)]
        passes = [[stage.title, own_function(stage.apply)] for stage in stages]
        return {"kind": type(self).__name__, "grad": self.grad, "options": asdict(self.options), "passes": passes}

    def load(self, key: Key) -> bool:
        """Begin with what another process compiled."""
        start = time.perf_counter()
        try:
            with collection_paused():
                stored = load(key, self.options.executors)
                if stored is None:
                    return False
                programs = [Program(p.name, p.trace, finished(p.trace, p.boxed), p.boxed) for p in stored.parts]
                self.executable = self.restored(programs, stored)
        except FAULTS as error:
            log(1, f"{self.name}: what is stored does not load: {_told(error)}")
            return False
        COUNTS["loaded"] += 1
        self.from_cache, self.seconds = True, time.perf_counter() - start
        log(1, f"{self.name}: from the cache in {self.seconds:.2f} s")
        return True

    def restored(self, programs: list[Program], stored: Stored) -> Executable:
        details = stored.details
        layout, bridge = read_layout(details["layout"], stored.reader), read_bridge(details["bridge"], stored.reader)
        return self.assemble(programs, Ends(layout, bridge, tuple(details["written"])), self.captured)

    def try_to_store(self, key: Key) -> None:
        try:
            with collection_paused():
                self.store(key)
        except FAULTS as reason:
            log(1, f"{self.name}: not kept on disk: {_told(reason)}")

    def store(self, key: Key) -> None:
        save(key, self.options.executors, [Part(p.name, p.trace, p.boxed) for p in self.programs], self.details)

    def details(self, writer: Writer) -> dict:
        """What joins the programs, as data."""
        ends = self.executable.ends
        return {
            "layout": write_layout(ends.layout, writer),
            "bridge": write_bridge(ends.bridge, writer),
            "written": ends.written,
        }


def _every_stage() -> bool:
    """Every stage of every layer is wanted."""
    return bool(config.dump or config.verify or config.autotune or config.log >= 2)


def _programs(compiled: Compiled) -> list[Program]:
    if len(compiled.programs) == 1:
        (trace,) = compiled.programs
        return [Program("inference", trace, finished(trace))]
    forward, backward = compiled.programs
    return [
        Program(FORWARD, forward, finished(forward)),
        Program(BACKWARD, backward, finished(backward, boxed=True), boxed=True),
    ]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, Unserial) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Failure:
    """A graph that was captured and could not be compiled; its error carries it as `tessera_failure`."""

    name: str
    captured: Captured
    options: Options
    error: Exception


def compile_captured(captured: Captured, eager: Callable, name: str, options: Options) -> tuple[Callable, Compilation]:
    """A callable for a captured graph, and the account of how it was made."""
    try:
        compilation = Compilation(name, captured, eager, options)
    except Exception as error:
        error.tessera_failure = Failure(name, captured, options, error)  # type: ignore[attr-defined]
        raise

    def entry(*args):  # noqa: ANN002, ANN202
        return compilation.executable.call(*args)  # looked up at each call: `edit` may replace it

    def switching(*args):  # noqa: ANN002, ANN202
        out = compilation.executable.call(*args)
        set_grad_enabled(captured.grad_after)  # type: ignore[arg-type]
        return out

    return entry if captured.grad_after is None else switching, compilation
