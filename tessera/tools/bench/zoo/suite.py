"""The command line's side of `tessera bench zoo`: options in, an `Outcome` out."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from tessera.tools.bench.model_contestants import EAGER, INDUCTOR, OURS, TUNED
from tessera.tools.bench.report import Outcome
from tessera.tools.bench.zoo.registry import entries
from tessera.tools.bench.zoo.report import BARS, missed, rows, summary, table
from tessera.tools.bench.zoo.results import OK, Cell, Results, code
from tessera.tools.bench.zoo.run import Options, run
from tessera.tools.command import chosen_device
from tessera.util.errors import OptionError
from tessera.util.units import duration

WHO = (EAGER, INDUCTOR, OURS)
SECTIONS = tuple(dict.fromkeys(name for e in entries(tiny=True) for name in (e.network.name, e.name)))
STDOUT = "-"


def outcome(args: Namespace, say: Callable[[str], None]) -> Outcome:
    options = options_of(args)
    results = Results.of_file(Path(args.json) if args.json and args.json != STDOUT else None)
    left = run(options, results, say, tell)
    shown = rows(options.entries(), results.shown.values())
    told = missed(shown, () if options.tiny else BARS)  # tiny sizes say nothing of speed
    document = results.document() | {"summary": summary(shown, told)}
    return Outcome(note(options, results, left, told), table(shown), [], bool(told), document)


def tell(cell: Cell) -> None:
    """A line for those who wait."""
    text = duration(cell.seconds) if cell.status == OK else f"{cell.status}, {cell.why}"
    print(f"{cell.job} {cell.size}, {cell.who}: {text} ({cell.wall:.0f} s)", file=sys.stderr)


def note(options: Options, results: Results, left: list[str], told: list[str]) -> str:
    parts = [f"median of {options.rounds} rounds; * is held back from tuning"]
    if any(cell.beside > 1 for cell in results.shown.values()):
        parts.append("first calls were made side by side")
    if any(cell.who == OURS and cell.code != code() for cell in results.shown.values()):
        parts.append("some of Tessera's figures are of another state of its code")
    if left:
        parts.append(f"no time was left for {len(left)}: {', '.join(left[:8])}{', …' if len(left) > 8 else ''}")
    return escape("; ".join(parts) + "".join(f"\nmissed: {bar}" for bar in told))


def options_of(args: Namespace) -> Options:
    device = chosen_device(args, "try --device cpu --tiny")
    if device == "cpu" and not args.tiny:
        raise OptionError("the zoo's models want a CUDA device; --tiny runs them at sizes for a CPU")
    given = {"rounds": args.rounds, "limit": args.limit, "jobs": args.jobs, "kernels": args.kernels}
    return Options(
        only=tuple(args.only),
        held=args.held_back,
        who=_who(args),
        device=device,
        tiny=args.tiny,
        deadline=args.deadline,
        resume_ours=args.resume_ours,
        retry=args.retry,
        **{name: value for name, value in given.items() if value},
    )


def _who(args: Namespace) -> tuple[str, ...]:
    who: list[str] = list(args.who or WHO)
    for name in who:
        if name not in WHO:
            raise OptionError(f"--who: expected some of {', '.join(WHO)} for the zoo, got {name!r}")
    if args.best and INDUCTOR in who:
        at = who.index(INDUCTOR) + 1
        who[at:at] = TUNED
    return tuple(who)
