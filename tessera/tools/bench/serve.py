"""`tessera bench serve`: how fast requests are answered.

With a folder, a server is started over it; with `--url`, one that runs is asked, whoever made it; with `--table`, all
figures are measured that serving is held to, on models with random weights. Goodput counts requests whose first token
and whose tokens came in the asked time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from tessera.tools.bench.report import Outcome, to_json
from tessera.tools.bench.serve_load import Result, arrivals, drive, percentile, replayed, served_model
from tessera.tools.bench.serve_outside import started
from tessera.tools.bench.serve_place import Measured, Place, Say
from tessera.tools.bench.serve_table import JOBS, compared, known, measured
from tessera.tools.command import above, chosen_device
from tessera.tools.machine import machine as here
from tessera.util.errors import OptionError

SECTIONS = JOBS


def arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("serve")
    group.add_argument("folder", nargs="?", help="a model to serve and measure")
    group.add_argument("--url", help="a server that runs, such as http://localhost:8000")
    group.add_argument("--table", action="store_true", help="all figures, on models with random weights; with --json "
                       "PATH those that are not measured again are kept from there")  # fmt: skip
    group.add_argument("--key", default="", help="a key to ask with")
    group.add_argument("--requests", type=above(0), default=100, help="how many (100)")
    group.add_argument("--rate", type=above(-1e-9), default=0.0, help="requests a second (0: all at once)")
    group.add_argument("--bursty", action="store_true", help="the same rate, eight at a time")
    group.add_argument("--input-tokens", type=above(0), default=512, help="of a prompt (512)")
    group.add_argument("--output-tokens", type=above(0), default=128, help="of an answer (128)")
    group.add_argument("--spread", type=above(-1e-9), default=0.0, help="lengths differ by up to this share (0)")
    group.add_argument("--shared-prefix", type=above(-1), default=0, help="tokens with which all prompts begin (0)")
    group.add_argument("--vocabulary", type=above(1), default=1000, help="prompts are of tokens below this (1000)")
    group.add_argument("--replay", type=Path, help="a file of arrivals, in place of all that: JSON, one a line")
    group.add_argument("--slo-first", type=above(0.0), default=0.2, help="goodput: seconds to the first token (0.2)")
    group.add_argument("--slo-between", type=above(0.0), default=0.03, help="goodput: seconds between tokens (0.03)")
    group.add_argument("--serve-options", default="", help="options for `tessera serve FOLDER`, as one text")


def outcome(args: Namespace, say: Say) -> Outcome:
    if args.table:
        rows, note = whole_table(args, say)
    else:
        rows, note = online(args, say)
    shown = [*rows, *compared(rows)]
    return Outcome(note, table(shown), listed(shown), any(row.passed is False for row in shown))


def listed(rows: list[Measured]) -> list[dict[str, object]]:
    return [{**asdict(row), "passed": row.passed} for row in rows]


def whole_table(args: Namespace, say: Say) -> tuple[list[Measured], str]:
    """Rows go to the file of `--json` and to stderr as they are made: what ends a run early loses none of them."""
    file = Path(args.json) if args.json and args.json != "-" else None

    def done(new: list[Measured], rows: list[Measured]) -> None:
        for row in new:
            print(row.line(), file=sys.stderr)
        if file is not None:
            file.write_text(json.dumps(to_json(args.suite, here(), listed([*rows, *compared(rows)])), indent=2) + "\n")

    device = chosen_device(args)
    options: dict[str, object] = {"compiled": False} if "--no-compile" in args.serve_options.split() else {}
    rows = measured(args.only, Place(device, args.tiny, say, options), args.deadline, known(file), done)
    return rows, f"random weights in {'float32, tiny,' if args.tiny else 'bfloat16'} on {device}, one run each"


def online(args: Namespace, say: Say) -> tuple[list[Measured], str]:
    """Through HTTP."""
    if (args.url is None) == (args.folder is None):
        raise OptionError("expected a folder, --url or --table")
    lengths = args.input_tokens, args.output_tokens
    requests = replayed(args.replay, args.vocabulary) if args.replay else arrivals(
        args.requests, args.rate, lengths, args.shared_prefix, args.bursty, args.spread, args.vocabulary
    )  # fmt: skip
    options = [*(["--device", args.device] if args.device else []), *args.serve_options.split()]
    with contextlib.nullcontext(args.url) if args.url else started(args.folder, options, say) as url:
        model = served_model(url, args.key)
        say("warming up")
        asyncio.run(drive(url, model, args.key, arrivals(2, 0, (8, 4), vocabulary=args.vocabulary, seed=9)))
        say(f"{len(requests)} requests")
        results, took = asyncio.run(drive(url, model, args.key, requests))
    return figures(results, took, args.slo_first, args.slo_between), f"{model} at {url}, {len(requests)} requests"


def figures(results: list[Result], took: float, first: float, between: float) -> list[Measured]:
    """What the results say together. Requests that were refused count against goodput alone."""
    done = [r for r in results if r.status == 200]
    gaps = [gap for r in done for gap in r.between]
    good = sum(r.first <= first and percentile(r.between, 50) <= between for r in done)
    failed = [r.error for r in results if r.status != 200]
    told = f"{len(failed)} refused or failed" + (f", the first with {failed[0]}" if failed else "")
    rows = [
        Measured("online", "throughput", sum(r.tokens for r in done) / took, "tok/s"),
        Measured("online", "requests", len(done) / took, "1/s", note=told),
        Measured("online", "goodput", good / took, "1/s", note=f"{good} of {len(results)} in time"),
    ]
    for what, values in (("first token", [r.first for r in done]), ("between tokens", gaps)):
        rows += [Measured("online", f"{what}, p{p}", 1e3 * percentile(values, p), "ms") for p in (50, 90, 99)]
    return [*rows, Measured("online", "whole answer, p50", 1e3 * percentile([r.whole for r in done], 50), "ms")]


def table(rows: list[Measured]) -> Table:
    shown = Table("job", "what", "measured", "asked", "limit", "of limit", "")
    for row in rows:
        asked = "" if row.bound is None else f"{'≥' if row.at_least else '≤'} {row.bound:,.4g}"
        share = limit = value = ""
        if row.value is not None:
            value = f"{row.value:,.4g} {row.unit}"
        if row.value and row.limit is not None:
            limit = f"{row.limit:,.4g}"
            share = f"{(row.value / row.limit if row.at_least else row.limit / row.value):.2f}"
        mark = {None: "", True: "met", False: "missed"}[row.passed]
        shown.add_row(row.job, row.what, value, asked, limit, share, escape(" ".join(filter(None, (mark, row.note)))))
    return shown
