"""Each pipeline as a visible list of named stages, and the function that runs a captured graph through one.

    captured trace -> clean (inline first) -> (vjp -> clean -> remat) -> final -> claim -> generated Python

Every stage's program is kept in a `Compilation`, named, so that it can be printed, diffed, saved and edited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import torch
from torch._dynamo.convert_frame import compile_lock

from tessera.executors import default
from tessera.executors.aten import bind
from tessera.executors.base import FusionExecutor, in_order
from tessera.executors.claim import Claim, claim
from tessera.executors.dumped import dump_kernels
from tessera.frontends.captured import Aliased, Captured
from tessera.ir import fake
from tessera.ir.equation import Arg, Equation, Value, values_in
from tessera.ir.printer import compile_trace
from tessera.ir.schema import has_effect
from tessera.ir.serial import Writer
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import verify
from tessera.ops.fp8 import refusal
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.clean.inline import inline
from tessera.passes.clean.known import Given, known
from tessera.passes.memory.lay_out import lay_out
from tessera.passes.memory.offload import Halves, candidates, fitting, offload, peak
from tessera.passes.memory.prefetch import MOVES, prefetch
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import lifetimes, schedule
from tessera.passes.patterns.fp8 import Layers, fp8
from tessera.passes.patterns.linear_loss import chunk_loss, linear_loss
from tessera.runtime.again import Again, Derivative, no_forward_mode
from tessera.runtime.autograd import Bridge, bridge, with_grad
from tessera.runtime.call import Layout, build_call
from tessera.runtime.capturable import device_of, why_not_captured
from tessera.runtime.contracts import checked_inputs, contracts
from tessera.runtime.cudagraph import Graphed
from tessera.runtime.plan import backward_graph, bridge_of, core_of, layout_of, positions_read
from tessera.store.key import Key, key_of, own_function
from tessera.store.program import (
    COUNTS,
    FAULTS,
    Part,
    Stored,
    load,
    read_bridge,
    read_layout,
    save,
    write_bridge,
    write_layout,
)
from tessera.transforms.remat import POLICIES, remat
from tessera.transforms.vjp import Joint, vjp
from tessera.util.collect import uncollected
from tessera.util.config import check_flags, config, override, parse_bytes
from tessera.util.errors import OptionError, Unserial
from tessera.util.log import log

Pass = Callable[[Trace], Trace]
Keep = Callable[[str, Trace], Trace]  # takes a stage down, and gives the program to go on with

# Bodies in place first, for no other pass looks into them. Then local rewrites: they expose equal equations to cse;
# dce last sweeps what both left.
CLEAN: list[tuple[str, Pass]] = [
    ("inline", inline),
    ("canonicalise", canonicalise),
    ("fold", fold),
    ("cse", cse),
    ("dce", dce),
]
# After differentiation nothing carries gradients any more: detach and its like are only names.
last = partial(canonicalise, differentiable=False)
CLEAN_JOINT: list[tuple[str, Pass]] = [("canonicalise", last), ("fold", fold), ("cse", cse)]
# After claiming, so that executors see functional operators; reinplace late, since it reads the final order. What
# executors `finish` comes right before the last, since before `reinplace` nothing is written.
FINAL: list[tuple[str, Pass]] = [
    ("schedule", schedule),
    ("reinplace", reinplace),
    ("lay_out", lay_out),  # last: it must stand right behind whatever calls the kernel
]


# Stages whose program a user may replace: those before executors put their own callables in.
CLEANED = ("captured", *(name for name, _ in CLEAN))
EDITABLE = (*CLEANED, "forward", "backward")


@dataclass(frozen=True)
class Options:
    executors: tuple[str, ...] = ()
    recompute: str = "auto"
    memory_budget: int | None = None
    cuda_graph: str = "off"  # replay programs as CUDA graphs: off · on · auto (where it pays)
    offload: str = "none"  # where large tensors wait for backward: none (where they are) · host

    @staticmethod
    def of(
        executors: str | list[str] | tuple[str, ...] | None,
        recompute: str | None,
        memory_budget: str | int | None,
        cuda_graph: bool | str = False,
        offload: str | None = None,
    ) -> Options:
        where = config.offload if offload is None else offload
        check_flags({"offload": where})
        if cuda_graph not in (True, False, "auto"):
            raise OptionError(f"cuda_graph: expected True, False or 'auto', got {cuda_graph!r}")
        listed = config.executors if executors is None else executors
        if not isinstance(listed, (str, list, tuple)):
            raise OptionError(f"executors: expected a list of names, got {listed!r}")
        names = default.named(listed) if isinstance(listed, str) else tuple(listed)
        in_order(names)  # an unknown name is refused here, where the user wrote it
        if (recompute or config.recompute) not in POLICIES:
            raise OptionError(f"recompute: expected one of {', '.join(POLICIES)}, got {recompute!r}")
        budget = memory_budget if memory_budget is not None else config.memory_budget or None
        policy = recompute or config.recompute
        if policy == "auto":  # where kernels are fused, arithmetic run again costs less than memory read again
            policy = "cheap" if any(isinstance(e, FusionExecutor) for e in in_order(names)) else "views"
        graph = cuda_graph if isinstance(cuda_graph, str) else "on" if cuda_graph else "off"
        return Options(names, policy, None if budget is None else parse_bytes(budget), graph, where)


@dataclass(frozen=True)
class Program:
    """A program as it is run: the last trace, and the Python function generated from it."""

    name: str  # "forward" and "backward", or "inference"
    trace: Trace
    run: Callable
    boxed: bool = False  # `run` takes one list, which it empties


# What is known of a compilation once it was built, and is not needed to call it.
ACCOUNT = (
    "stages", "claims", "to_claim", "programs", "saved_bytes", "saved", "results", "offloaded", "offload_note", "fp8",
    "joint", "core", "kept",
)  # fmt: skip

# Told of every compilation when it is built; whoever measures a script looks on here. Empty otherwise.
WATCHERS: list[Callable[[Compilation], None]] = []


class Compilation:
    """One captured graph on its way to a callable: every stage, and what was decided."""

    def __init__(
        self, name: str, captured: Captured, eager: Callable, options: Options, given: tuple[Given, ...] = ()
    ) -> None:
        """`given`: values that are known when the program begins, because others computed them."""
        self.name, self.captured, self.eager, self.options = name, captured, eager, options
        self.given = given
        self.grad_enabled = torch.is_grad_enabled() or captured.enables_grad
        self.edits: dict[str, Trace] = {}
        self.flags = {field.name: getattr(config, field.name) for field in fields(config)}
        self.from_cache = False
        key = self.key()
        if key is None or not self.load(key):
            self.build()
            if key is not None:
                self.try_to_store(key)
            count = sum(len(p.trace.equations) for p in self.programs)
            log(1, f"{name}: {count} equations, {self.seconds:.2f} s to compile")
        for tell in WATCHERS:
            tell(self)

    # --- programs kept on disk ---

    def key(self) -> Key | None:
        """What a stored program would be found by; None where there can be none, or where every stage is wanted."""
        if not config.program_cache or config.dump or config.verify or config.autotune or config.log >= 2:
            return None
        if self.given:  # they would belong to the key
            return None
        try:
            return key_of(self.captured, self.options.executors, self.identity())
        except FAULTS as reason:  # whatever is wrong, nothing is kept; what was compiled runs
            log(1, f"{self.name}: not kept on disk: {_told(reason)}")
            return None

    def identity(self) -> dict[str, object]:
        """What this is made from besides the captured program, as data. Users may add passes to the lists."""
        passes = [[name, own_function(step)] for name, step in (*CLEAN, *CLEAN_JOINT, *FINAL)]
        options = asdict(self.options)
        return {"kind": type(self).__name__, "grad": self.grad_enabled, "options": options, "passes": passes}

    def load(self, key: Key) -> bool:
        """Begin with what another process compiled. The stages are built once somebody asks for them."""
        start = time.perf_counter()
        try:
            with uncollected():
                stored = load(key, self.options.executors)
                if stored is None:
                    return False
                self.restore(stored)
        except FAULTS as error:
            log(1, f"{self.name}: what is stored does not load: {_told(error)}")
            return False
        COUNTS["loaded"] += 1
        self.from_cache, self.seconds = True, time.perf_counter() - start
        log(1, f"{self.name}: from the cache in {self.seconds:.2f} s")
        return True

    def try_to_store(self, key: Key) -> None:
        try:
            self.store(key)
        except FAULTS as reason:
            log(1, f"{self.name}: not kept on disk: {_told(reason)}")

    def store(self, key: Key) -> None:
        save(key, self.options.executors, [Part(p.name, p.trace, p.boxed) for p in self.programs], self.details)

    def details(self, writer: Writer) -> dict:
        """What joins the programs, as data."""
        return {
            "layout": write_layout(self.layout, writer),
            "bridge": write_bridge(self.bridge),
            "written": self.written,
        }

    def restore(self, stored: Stored) -> None:
        """Be what was stored, as far as calls need it."""
        details = stored.details
        self.layout, self.bridge = read_layout(details["layout"], stored.reader), read_bridge(details["bridge"])
        self.written, self.cuda_graph = tuple(details["written"]), ""
        self.finish([Program(p.name, p.trace, finished(p.trace, p.boxed), p.boxed) for p in stored.parts])

    def __getattr__(self, name: str) -> object:
        """Of a program that came from the cache nobody has the stages: build them when they are asked for. What runs
        stays as it is."""
        if name not in ACCOUNT or not self.__dict__.get("from_cache"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        running = dict(self.__dict__)
        account: dict[str, object] = {}
        try:
            with override(**self.flags):
                self.build()
            account = dict(self.__dict__)
        finally:
            self.__dict__.clear()
            self.__dict__.update(account | running)
        return self.__dict__[name]

    # --- building ---

    def build(self) -> None:
        """Run the pipeline; differentiable if grad mode was on and an input requires grad."""
        start = time.perf_counter()
        self.reset()
        core = core_of(self.keep("captured", self.captured.trace), self.captured)
        needs = zip(core.inputs, self.captured.requires_grad, strict=True)
        wrt = [v for v, wanted in needs if wanted and _floats(v)] if self.grad_enabled else []
        core = self.core = self.clean(core, wrt)
        if wrt and self.fusers():  # kernels of ours make the loss's gradient beside the loss
            core = self.keep("linear_loss", dce(linear_loss(core)))
        joint = vjp(core, wrt, self.captured.mode) if wrt else None
        self.written = tuple(i for i, v in enumerate(core.inputs) if v in core.mutations)
        if joint is not None and joint.pulled:
            self.joint = joint
            _training(self, joint)
        else:
            _inference(self, core)
        self.finish(self.programs)
        self.seconds = time.perf_counter() - start

    def finish(self, programs: list[Program]) -> None:
        """What the caller calls."""
        runs = [program.run for program in programs]
        self.reads = positions_read(programs[0].trace)
        if self.bridge is None:
            runs = [self.replayed(runs[0], programs[0].trace, self.written)]
        elif self.options.cuda_graph != "off":
            self.cuda_graph = "no CUDA graph: gradients flow through it; tessera.train_step replays whole steps"
        self.call = self.join(*runs)

    def join(self, *runs: Callable) -> Callable:
        """Programs as one call. Kept apart from them, so that a profiler can join others that do the same."""
        if self.bridge is None:
            return build_call(runs[0], self.layout, self.eager, guarded=True)
        forward, backward = runs
        core = bridge(forward, backward, self.bridge, Again(self.bridge, self.derivative))
        if self.captured.enables_grad:
            core = with_grad(core)
        return build_call(core, self.layout, self.eager, guarded=False)

    def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        """The backward as a graph that can be differentiated in turn; `wanted` says by which cotangents."""
        name, flags = f"{self.name}_again", {"dump": "", **self.flags}
        with compile_lock, fake.alone(), torch.enable_grad(), override(**flags):
            captured, given = backward_graph(self.captured, self.core, self.bridge, self.kept, wanted, name)
            made = Compilation(name, captured, no_forward_mode, self.options, (*self.given, given))
        inputs = captured.trace.inputs
        devices = tuple(v.type.device if isinstance(v.type, TensorType) else None for v in inputs)
        return Derivative(made.call, made.reads, tuple(v.name for v in inputs), devices)

    def reset(self) -> None:
        """Nothing is built yet."""
        self.stages: list[tuple[str, Trace]] = []
        self.claims: list[Claim] = []
        self.to_claim: list[Trace] = []
        self.programs: list[Program] = []
        self.cuda_graph: object = ""  # what replays the program, or in words why nothing does
        self.saved_bytes: int = 0
        self.saved: tuple[str, ...] = ()
        self.results = 0  # how many outputs of a forward are the caller's; the others are saved
        self.offloaded: dict[str, int] = {}  # saved tensors that wait on the host, and their bytes
        self.offload_note = ""  # what there is to say of them
        self.fp8 = Layers()  # layers that multiply in 8 bits, and those that could not
        self.joint: Joint | None = None  # as differentiated, before it was cleaned
        self.core: Trace | None = None  # what was differentiated
        self.kept: tuple[Trace, tuple[Value, ...]] | None = None  # the forward's equations, and what it saves
        self.bridge: Bridge | None = None  # how a forward and a backward line up, where there are two
        self.layout = Layout(())

    def edit(self, stage: str, trace: Trace, aliased: dict[int, Aliased] | None = None) -> None:
        """Use another program from this stage on. Edits of later stages go: they were made of what this replaces.

        `aliased`: of another captured program, the outputs that are made from inputs and other outputs still.
        """
        before = dict(self.__dict__)
        if aliased is not None:
            self.captured = replace(self.captured, trace=trace, aliased=aliased)
        earlier = EDITABLE[: EDITABLE.index(stage)] if stage in CLEANED else EDITABLE
        self.edits = {name: kept for name, kept in self.edits.items() if name in earlier} | {stage: trace}
        try:
            self.build()
        except BaseException:  # what ran goes on running
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        self.from_cache = False

    def keep(self, stage: str, trace: Trace) -> Trace:
        trace = self.edits.get(stage, trace)
        self.stages.append((stage, trace))
        if config.verify:
            verify(trace)
        if config.dump:
            folder = os.path.join(config.dump, self.name)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            start = os.path.join(folder, f"{len(self.stages):02d}_{stage.replace(' ', '_')}")
            trace.save(f"{start}.py")
            if stage.endswith("claim"):
                dump_kernels(trace, start)
        log(2, f"{self.name}: {stage}: {len(trace.equations)} equations")
        log(3, trace)
        return trace

    def fusers(self) -> list[FusionExecutor]:
        return [e for e in in_order(self.options.executors) if isinstance(e, FusionExecutor)]

    def apart(self, trace: Trace, prefix: str = "", keep: Keep | None = None) -> Trace:
        """Operators in the parts that fusion executors want them in."""
        for executor in self.fusers():
            if executor.apart is not None:
                trace = (keep or self.keep)(f"{prefix}decompose", executor.apart(trace))
        return trace

    def unfused(self) -> dict[str, list[str]]:
        """Why equations are in no fused region: reason -> names. Computed when asked for."""
        found: dict[str, list[str]] = {}
        for trace in self.to_claim:
            for executor in self.fusers():
                if executor.reasons is not None:
                    for name, reason in executor.reasons(trace).items():
                        found.setdefault(reason, []).append(name)
        return found

    def run(self, trace: Trace, passes: list[tuple[str, Pass]], prefix: str = "") -> Trace:
        for name, step in passes:
            trace = self.keep(f"{prefix}{name}", step(trace))
        return trace

    def clean(self, trace: Trace, wrt: Collection[Value]) -> Trace:
        """What was captured, with all that differentiation with respect to these inputs sees."""
        return self.run(trace, [(n, partial(step, wrt=wrt) if step is canonicalise else step) for n, step in CLEAN])

    def claimed(self, trace: Trace, prefix: str = "") -> Trace:
        """Who runs what."""
        trace = self.prepared(trace, prefix, self.keep)
        self.to_claim.append(trace)  # `unfused` looks here
        claimed, report = claim(trace, self.options.executors)
        self.claims += report
        return self.keep(f"{prefix}claim", claimed)

    def prepared(self, trace: Trace, prefix: str, keep: Keep) -> Trace:
        """As executors want to see it."""
        if (chunked := chunk_loss(trace)) is not trace:
            trace = self.apart(keep(f"{prefix}chunk_loss", chunked), prefix, keep)
        for executor in self.fusers():
            if executor.prepare is not None:
                trace = keep(f"{prefix}prepare", dce(executor.prepare(trace)))
        return trace

    def rehearsed(self, trace: Trace) -> Trace:
        """What claiming and scheduling will make of a trace; nothing is kept."""
        return schedule(claim(self.prepared(trace, "", lambda _, made: made), self.options.executors)[0])

    def offload(self, halves: Halves) -> Halves:
        """Forward and backward, where saved tensors wait on the host: all large ones, or as many as the budget asks."""
        if self.options.offload == "none":
            return halves
        chosen, budget = candidates(halves), self.options.memory_budget
        if not chosen:
            self.offload_note = "nothing that is saved is large, and free until backward has begun"
        elif budget is not None:
            whole = Halves(self.rehearsed(halves.forward), self.rehearsed(halves.backward), halves.saved)
            everything, chosen = chosen, fitting(whole, chosen, budget)
            if not chosen:
                self.offload_note = "the programs fit the budget without it"
            elif len(chosen) == len(everything) and (most := peak(offload(whole, chosen))) > budget:
                self.offload_note = (
                    f"the predicted peak of {most / 2**20:.2f} MiB is above the budget with all of them; "
                    "recompute='cheap' or tessera.checkpoint keeps less"
                )
        self.offloaded = {v.name: v.tensor.nbytes() for v in chosen}
        self.saved = tuple(name for name in self.saved if name not in self.offloaded)
        self.saved_bytes -= sum(self.offloaded.values())
        return offload(halves, chosen)

    def final(self, trace: Trace, prefix: str = "", backward: Collection[Value] = ()) -> Trace:
        """The last passes. Copies to and from the host find their places in the final order, before anything is written
        over what is still being copied."""
        executors = in_order(self.options.executors)
        passes = [*FINAL[:-1], *((e.finish.__name__, e.finish) for e in executors if e.finish is not None), FINAL[-1]]
        if any(eqn.op in MOVES for eqn in trace.equations):
            passes.insert(1, ("prefetch", partial(prefetch, backward=backward)))
        return self.run(trace, passes, prefix)

    def replayed(self, run: Callable, trace: Trace, written: tuple[int, ...]) -> Callable:
        """A program as one that is replayed as a CUDA graph, where that is wanted and can be."""
        if self.options.cuda_graph == "off":
            return run
        reason = why_not_captured(trace)
        self.cuda_graph = f"no CUDA graph: {reason}"
        device = device_of(trace)
        if reason or device is None:
            return run
        fixed = [isinstance(v.type, TensorType) and not v.type.is_symbolic for v in trace.inputs]
        varying = [i for i, known in enumerate(fixed) if not known]
        always = self.options.cuda_graph == "on"
        self.cuda_graph = graphed = Graphed(run, written, device, varying=varying, always=always)
        return graphed

    def generate(self, trace: Trace, prefix: str = "", boxed: bool = False) -> None:
        """Executors, final passes, Python: one more program."""
        final = self.final(self.claimed(trace, prefix), prefix)
        self.programs.append(Program(prefix.strip() or "inference", final, finished(final, boxed), boxed))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, Unserial) else f"{type(error).__name__}: {error}"


def finished(final: Trace, boxed: bool = False) -> Callable:
    """The last program as generated Python; boxed, its inputs die with their last reader too. With `verify` it compares
    whatever its equations give with what the trace says."""
    dead = lifetimes(final, inputs=boxed)
    if not config.verify:
        return compile_trace(final, bind=bind, dead=dead, boxed=boxed)
    around, names = contracts(final)
    run = compile_trace(final, bind=bind, dead=dead, around=around, names_in_scope=names, boxed=boxed)
    return checked_inputs(final, run, boxed)


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
        return compilation.call(*args)  # looked up at each call: `edit` may replace it

    def switching(*args):  # noqa: ANN002, ANN202
        out = compilation.call(*args)
        torch._C._set_grad_enabled(captured.grad_after)
        return out

    return entry if captured.grad_after is None else switching, compilation


def _inference(compilation: Compilation, core: Trace) -> None:
    """Generates the one program."""
    for executor in in_order(compilation.options.executors):
        if executor.rewrite is not None:
            core = compilation.keep(executor.rewrite.__name__, executor.rewrite(core))
    narrow, compilation.fp8 = fp8(core, refusal)
    if narrow is not core:
        core = compilation.keep("fp8", narrow)
    core = compilation.run(compilation.apart(core), [("inference canonicalise", last), ("inference dce", dce)])
    compilation.layout = layout_of(compilation.captured, core, list(core.outputs), {})  # type: ignore[arg-type]
    compilation.generate(core)


def _training(compilation: Compilation, joint: Joint) -> None:
    """Generates a forward and a backward, and says how the two are joined."""
    compilation.keep("vjp", joint.trace)
    joint = clean_joint(compilation, joint)
    captured, options = compilation.captured, compilation.options
    split = remat(joint, options.recompute, recompute_budget(options))
    compilation.saved_bytes = split.saved_bytes
    compilation.saved = tuple(v.name for v in split.saved if v not in joint.trace.inputs)
    count = len(split.forward.outputs) - len(split.saved)
    results = list(dict.fromkeys(split.forward.outputs[:count]))  # each once: autograd gives each one grad_fn
    compilation.results = len(results)
    halves = Halves(dce(split.forward.with_(outputs=(*results, *split.saved))), dce(split.backward), split.saved)
    halves = compilation.offload(halves)
    forward = compilation.keep("forward", halves.forward)
    backward = compilation.keep("backward", halves.backward)
    compilation.bridge = bridge_of(captured, joint, split, results, compilation.given)
    compilation.kept = (split.forward, split.saved)
    compilation.generate(forward, "forward ")
    compilation.generate(backward, "backward ", boxed=True)
    outputs = joint.trace.outputs[: len(joint.trace.outputs) - len(joint.wrt)]
    write_back = {t: joint.trace.mutations[t] for t in split.returned}
    compilation.layout = layout_of(captured, joint.trace.with_(outputs=outputs), results, write_back)  # type: ignore[arg-type]


def recompute_budget(options: Options) -> int | None:
    """What may be saved. Where saved tensors can go to the host instead, the budget is met by that alone."""
    return options.memory_budget if options.offload == "none" else None


def clean_joint(compilation: Compilation, joint: Joint) -> Joint:
    """Take the joint program apart for who will run it, clean it, and sort forward before backward again."""
    trace = joint.trace.with_(outputs=(*joint.trace.outputs, *joint.pulled))
    trace = compilation.run(compilation.apart(trace, "joint "), CLEAN_JOINT, "joint ")
    if compilation.given:
        trace = compilation.keep("joint known", known(trace, compilation.given))
    count = len(joint.trace.outputs)
    outputs, pulled = trace.outputs[:count], trace.outputs[count:]
    early = _forward_part(trace, [*outputs[: count - len(joint.wrt)], *pulled], _cotangents(joint))
    forward = [e for e in trace.equations if e in early]
    backward = [e for e in trace.equations if e not in early]
    trace = trace.with_(outputs=outputs, equations=(*forward, *backward))
    return Joint(trace, joint.wrt, tuple(pulled), len(forward))  # type: ignore[arg-type]


def _forward_part(trace: Trace, results: list[Arg], cotangents: tuple[Value, ...]) -> set[Equation]:
    """What the program's own results need, and effects that no cotangent has a part in."""
    late: set[Value] = set(cotangents)
    for eqn in trace.equations:
        if any(v in late for v in eqn.inputs()):
            late.update(eqn.results())
    wanted = {*values_in(results), *trace.mutations.values(), *(v for v, _ in trace.symbols.values())}
    early: set[Equation] = set()
    for eqn in reversed(trace.equations):
        effect = has_effect(eqn) and not any(v in late for v in eqn.inputs())
        if effect or any(v in wanted for v in eqn.results()):
            early.add(eqn)
            wanted.update(eqn.inputs())
    return early


def _cotangents(joint: Joint) -> tuple[Value, ...]:
    return joint.trace.inputs[len(joint.trace.inputs) - len(joint.pulled) :]


def _floats(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.is_differentiable
