"""`tessera top URL`: what a server does now, from its metrics."""

from __future__ import annotations

import re
import time
import urllib.request
from argparse import ArgumentParser, Namespace

from rich.live import Live
from rich.table import Table

from tessera.tools.command import Command, above, console, json_argument, write_json
from tessera.util.errors import InputError

# What is shown: a figure as it is, how fast one grows, or the mean of what a histogram gained.
NOW = {"running": "num_requests_running", "waiting": "num_requests_waiting", "cache used": "kv_cache_usage_ratio"}
RATES = {
    "new tokens/s": "generation_tokens_total", "prompt tokens/s": "prompt_tokens_total",
    "reused tokens/s": "prefix_cache_hits_total", "preemptions/s": "num_preemptions_total",
    "steps/s": "engine_steps_total",
}  # fmt: skip
# Shares of a second, or of what another figure has gained.
SHARES = {
    "device idle": ("device_idle_seconds_total", None), "host waits": ("host_idle_seconds_total", None),
    "of the roofline": ("engine_step_limit_seconds_total", "engine_step_seconds_sum"),
}  # fmt: skip
MEANS = {
    "first token, ms": "time_to_first_token_seconds", "between tokens, ms": "inter_token_latency_seconds",
    "in the queue, ms": "request_queue_time_seconds", "step, ms": "engine_step_seconds",
}  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("url", help="a server, such as http://localhost:8000")
    parser.add_argument("--every", type=above(0.0), default=1.0, help="seconds between two looks (1)")
    parser.add_argument("--once", action="store_true", help="look twice, show once")
    json_argument(parser)


def read(url: str) -> dict[str, float]:
    """The metrics that have no labels, by name without the prefix."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url}: expected an address such as http://localhost:8000")
    with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^tessera_(\w+) (\S+)$", text, re.MULTILINE)}


def figures(before: dict[str, float], now: dict[str, float], seconds: float) -> dict[str, float]:
    def gained(name: str) -> float:
        return max(0.0, now.get(name, 0.0) - before.get(name, 0.0))  # an engine that started again counts from 0

    shown = {told: now.get(name, 0.0) for told, name in NOW.items()}
    shown |= {told: gained(name) / seconds for told, name in RATES.items()}
    for told, (name, whole) in SHARES.items():
        shown[told] = gained(name) / (max(gained(whole), 1e-9) if whole else seconds)
    for told, name in MEANS.items():
        shown[told] = 1e3 * gained(f"{name}_sum") / max(1.0, gained(f"{name}_count"))
    return shown


def table(shown: dict[str, float]) -> Table:
    table = Table("what", "now")
    for told, value in shown.items():
        table.add_row(told, f"{value:,.3g}")
    return table


def run(args: Namespace) -> int:
    before, start = read(args.url), time.monotonic()
    with Live(console=console(stderr=args.json), transient=args.json) as live:
        while True:
            time.sleep(args.every)
            now, end = read(args.url), time.monotonic()
            shown = figures(before, now, end - start)
            if args.once or args.json:
                break
            live.update(table(shown))
            before, start = now, end
    if not write_json(args, shown):
        console().print(table(shown))
    return 0


COMMAND = Command(arguments, run)
