"""`tessera bench core`: what compiling costs, what a call costs, what a training step costs, on one core.

Each section measures its contestants in fresh processes through `probe` and hands back rows. The targets
stand beside the sections they judge; `docs/performance.md` says how the numbers are taken.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tessera.tools.bench import probe
from tessera.tools.bench.measure import Samples, in_fresh_process
from tessera.tools.bench.report import Outcome, Row, Target, listed, rows, table

Say = Callable[[str], None]
TITLE = "one thread"
LAYERS = 12
BLOCKS = 100  # short blocks, for each round asked for, where a contestant is measured in one process


@dataclass(frozen=True)
class Options:
    """How long to measure, and whom. `who` of None means every usual contestant."""

    rounds: int = 3
    who: frozenset[str] | None = None
    extra: tuple[str, ...] = ()

    def choose(self, *usual: str) -> list[str]:
        """Those of the usual contestants that were asked for, and the extra ones."""
        return [who for who in usual if self.who is None or who in self.who] + list(self.extra)


def compile_cost(title: str, options: Options, say: Say, *, backward: bool, limit: float) -> list[Row]:
    """The first call of a GPT, and Tessera's of one twice as deep, which may cost at most twice as much."""
    jobs = {who: (who, LAYERS) for who in options.choose("dynamo", "aot_eager", "tessera[aten]")}
    deep = f"tessera[aten], {2 * LAYERS} layers"
    if "tessera[aten]" in jobs:
        jobs[deep] = ("tessera[aten]", 2 * LAYERS)
    samples: Samples = {name: [] for name in jobs}
    for number in range(options.rounds):
        for name, (who, layers) in jobs.items():
            say(f"{title}: {name}, round {number + 1} of {options.rounds}")
            samples[name].append(_probe(probe.compile_cost, who=who, layers=layers, backward=backward))
    targets = {"tessera[aten]": Target(limit, "aot_eager"), deep: Target(2.0, "tessera[aten]")}
    return rows(title, "ms", samples, "aot_eager", targets)


def call_overhead(title: str, options: Options, say: Say) -> list[Row]:
    """`a + b` on 2x2 tensors: the arithmetic is nothing, so what is measured is the way there."""
    say(title)
    who = options.choose("eager", "dynamo", "aot_eager", "tessera", "tessera[functional]")
    samples = _probe(probe.call_overhead, who=who, rounds=BLOCKS * options.rounds, repeat=100, backward=False)
    targets = {"tessera": Target(1.3, "dynamo"), "tessera[functional]": Target(15.0)}
    return rows(title, "µs", samples, "eager", targets)


def gradient_overhead(title: str, options: Options, say: Say) -> list[Row]:
    """The same with gradients: forward, then backward from a given cotangent."""
    say(title)
    who = options.choose("eager", "aot_eager", "tessera")
    samples = _probe(probe.call_overhead, who=who, rounds=BLOCKS * options.rounds, repeat=50, backward=True)
    return rows(title, "µs", samples, "eager", {"tessera": Target(0.7, "aot_eager")})


def training_step(title: str, options: Options, say: Say) -> list[Row]:
    """A steady training step of the 12-layer GPT: forward, loss, backward."""
    say(title)
    who = options.choose("eager", "aot_eager", "tessera[aten]")
    samples = _probe(probe.training_step, who=who, rounds=BLOCKS * options.rounds, repeat=1)
    return rows(title, "ms", samples, "eager", {"tessera[aten]": Target(1.02, "eager")})


SECTIONS: dict[str, Callable[[Options, Say], list[Row]]] = {
    "compile": partial(compile_cost, "first call, forward", backward=False, limit=1.2),
    "compile-train": partial(compile_cost, "first call, forward + backward", backward=True, limit=0.9),
    "call": partial(call_overhead, "a + b, per call"),
    "call-train": partial(gradient_overhead, "a + b, per call with backward"),
    "step": partial(training_step, "GPT training step"),
}


def options_of(args: Namespace) -> Options:
    """What the command line asks for."""
    extra = tuple(name for name in ("inductor", "thunder") if getattr(args, name) or name in (args.who or ()))
    return Options(args.rounds or 3, frozenset(args.who) if args.who else None, extra)


def outcome(args: Namespace, say: Say) -> Outcome:
    measured = run(args.only, options_of(args), say)
    return Outcome(
        TITLE, table(measured, "tessera bench core"), listed(measured), any(row.passed is False for row in measured)
    )


def run(only: Sequence[str], options: Options, say: Say) -> list[Row]:
    """Measure the named sections, or all of them."""
    return [row for name in only or SECTIONS for row in SECTIONS[name](options, say)]


def _probe(task: Callable[..., object], **options: object) -> Any:
    return in_fresh_process(probe.__name__, task.__name__, **options)
