"""What stages do that are more than a pass: they make other programs of a program, or note what they found.

Each takes the program it stands over, and from the run what its row says it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tessera.executors.base import Executor, FusionExecutor, in_order, passes_at
from tessera.executors.claim import claim
from tessera.ir.equation import Arg, Equation, Value, values_in
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ops.fp8 import lacking, refusal, rounds
from tessera.passes.clean.dce import dce
from tessera.passes.memory.offload import Halves, candidates, fitting, handed_over, offload, peak
from tessera.passes.memory.prefetch import MOVES
from tessera.passes.memory.schedule import schedule
from tessera.passes.patterns.fp8 import Layers, fp8
from tessera.passes.patterns.linear_loss import chunk_loss
from tessera.pipeline.account import Account
from tessera.pipeline.stage import BACKWARD, FORWARD
from tessera.transforms.fp8_layers import fp8_layers
from tessera.transforms.remat import remat
from tessera.transforms.vjp import Joint, vjp

if TYPE_CHECKING:
    from tessera.pipeline.run import Run

# --- when a stage applies ---


def with_kernels(run: Run, _: Trace) -> bool:
    """Kernels of ours take part."""
    return any(isinstance(e, FusionExecutor) for e in run.executors)


def differentiated_again(run: Run, _: Trace) -> bool:
    """Earlier programs saved something."""
    return bool(run.given)


def in_eight_bits(run: Run, _: Trace) -> bool:
    """The user asked for products of 8 bits. A gradient's gradient is taken of the layers as they were written."""
    return run.options.precision is not None and not run.given


def offloads(_: Run, trace: Trace) -> bool:
    """Saved tensors wait on the host."""
    return any(eqn.op in MOVES for eqn in trace.equations)


# --- what more than one kind of compilation does ---


def narrow(trace: Trace, account: Account) -> Trace:
    """Layers with weights of 8 bits multiply in 8 bits."""
    trace, account.fp8 = fp8(trace, refusal)
    return trace


def choose_layers(trace: Trace, run: Run) -> Trace:
    """Layers with weights of 16 bits multiply in 8 bits, where the user asked for it."""
    options = run.options
    assert options.precision is not None
    trace, reasons = fp8_layers(trace, options.precision, bool(run.wrt), lacking, options.histories)
    before = run.account.fp8
    multiplied = tuple(name for name, why in reasons.items() if not why)
    left = tuple((name, why) for name, why in reasons.items() if why)
    run.account.fp8 = Layers(before.multiplied + multiplied, before.left + left, str(options.precision))
    return trace


def chunk(trace: Trace, executors: Iterable[Executor]) -> Trace:
    """A loss in chunks of rows, written out for who will run it."""
    chunked = chunk_loss(trace)
    if chunked is trace:
        return trace
    for _, _, apply in passes_at("decompose", executors):
        chunked = apply(chunked)
    return chunked


def claimed(trace: Trace, run: Run) -> Trace:
    run.account.to_claim.append(trace)
    claimed, report = claim(trace, run.options.executors)
    run.account.claims += report
    return claimed


# --- differentiation ---


def differentiate(core: Trace, run: Run) -> Trace:
    """Forward and backward as one program. Where no result depends on an input that wants a gradient, the compilation
    goes on as one for inference."""
    joint = vjp(core, run.wrt, run.captured.mode, pull=run.pull(core))
    if not joint.pulled:
        run.without_gradient()
        return core
    run.account.joint = joint
    return joint.trace


def split(trace: Trace, run: Run) -> Trace:
    """What forward does, what backward does, and what the first saves for the second."""
    joint = run.joint = in_order_of_use(trace, run.account.joint)
    options, account = run.options, run.account
    # Where saved tensors can go to the host, the budget is met by that alone.
    budget = options.memory_budget if options.offload == "none" else None
    run.split = run.completed(remat(joint, options.recompute, budget))
    account.saved_bytes = run.split.saved_bytes
    given = set(joint.trace.inputs)
    account.saved = tuple(v.name for v in run.split.saved if v not in given)
    account.kept = (run.split.forward, run.split.saved)
    count = len(run.split.forward.outputs) - len(run.split.saved)
    run.results = list(dict.fromkeys(run.split.forward.outputs[:count]))  # each once: autograd gives each one grad_fn
    account.results = len(run.results)
    forward = dce(run.split.forward.with_(outputs=(*run.results, *run.split.saved)))
    run.halves = offloaded(Halves(forward, dce(run.backward_of(run.split)), run.split.saved), run)
    return run.halves.forward


def backward_half(_: Trace, run: Run) -> Trace:
    return run.halves.backward


def in_order_of_use(trace: Trace, differentiated: Joint | None) -> Joint:
    """The cleaned joint program with forward before backward again."""
    assert differentiated is not None
    before = differentiated.trace
    place = {v: i for i, v in enumerate(before.outputs) if isinstance(v, Value)}
    target = {v: t for t, v in before.mutations.items()}
    pulled = [
        trace.outputs[place[v]] if v in place else trace.mutations.get(target[v], target[v])
        for v in differentiated.pulled
    ]
    cotangents = before.inputs[len(before.inputs) - len(pulled) :]
    results = [*trace.outputs[: len(trace.outputs) - len(differentiated.wrt)], *pulled]
    early = _forward_part(trace, results, cotangents)
    forward = [e for e in trace.equations if e in early]
    backward = [e for e in trace.equations if e not in early]
    ordered = trace.with_(equations=(*forward, *backward))
    return replace(differentiated, trace=ordered, pulled=tuple(pulled), split=len(forward))  # type: ignore[arg-type]


def _forward_part(trace: Trace, results: list[Arg], cotangents: tuple[Value, ...]) -> set[Equation]:
    """What the program's own results need, and what no cotangent has a part in: effects, and numbers rounded to 8 bits,
    both for the forward and turned for the backward by one kernel."""
    late: set[Value] = set(cotangents)
    for eqn in trace.equations:
        if any(v in late for v in eqn.inputs()):
            late.update(eqn.results())
    wanted = {*values_in(results), *trace.mutations.values(), *(v for v, _ in trace.symbols.values())}
    early: set[Equation] = set()
    for eqn in reversed(trace.equations):
        effect = (has_effect(eqn) or rounds(eqn)) and not any(v in late for v in eqn.inputs())
        if effect or any(v in wanted for v in eqn.results()):
            early.add(eqn)
            wanted.update(eqn.inputs())
    return early


def ordered(trace: Trace, run: Run) -> Trace:
    """In an order that holds little memory. What forward saved dies in backward, with its last reader there."""
    forward = run.traces.get(FORWARD)
    backward = forward is not None and trace is run.traces.get(BACKWARD)
    return schedule(trace, handed_over(forward, trace, run.account.results) if backward else ())  # type: ignore[arg-type]


# --- saved tensors that wait on the host ---


def offloaded(halves: Halves, run: Run) -> Halves:
    """Saved tensors wait on the host: all large ones, or as many as the budget asks."""
    if run.options.offload == "none":
        return halves
    account, budget = run.account, run.options.memory_budget
    chosen = candidates(halves)
    if not chosen:
        account.offload_note = "nothing that is saved is large, and free until backward has begun"
    elif budget is not None:
        names = run.options.executors
        forward = _rehearsed(halves.forward, names)
        owned = handed_over(forward, halves.backward, halves.results)
        planned = Halves(forward, _rehearsed(halves.backward, names, owned), halves.saved)
        everything, chosen = chosen, fitting(planned, chosen, budget)
        if not chosen:
            account.offload_note = "the programs fit the budget without it"
        elif len(chosen) == len(everything) and (most := peak(offload(planned, chosen))) > budget:
            account.offload_note = (
                f"the predicted peak of {most / 2**20:.2f} MiB is above the budget with all of them; "
                "recompute='cheap' or tessera.checkpoint keeps less"
            )
    account.offloaded = {v.name: v.tensor.nbytes() for v in chosen}
    account.saved = tuple(name for name in account.saved if name not in account.offloaded)
    account.saved_bytes -= sum(account.offloaded.values())
    return offload(halves, chosen)


def _rehearsed(trace: Trace, names: tuple[str, ...], owned: Iterable[Value] = ()) -> Trace:
    """What claiming and scheduling will make of a program; nothing is kept."""
    executors = in_order(names)
    trace = chunk(trace, executors)
    for _, _, apply in passes_at("prepare", executors):
        trace = apply(trace)
    return schedule(claim(trace, names)[0], tuple(owned))
