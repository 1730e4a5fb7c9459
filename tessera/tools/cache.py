"""`tessera cache`: what compilation left on disk (programs, kernels, schedules), how large it is, and away with it."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from rich.table import Table

from tessera.inspection.render import size
from tessera.tools.command import Command, console, json_argument, write_json
from tessera.util import disk as cache
from tessera.util.errors import OptionError

ACTIONS = ("size", "list", "clear")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="size", help="what to do (default: size)")
    parser.add_argument("--kind", help="only entries of this kind, such as object or schedule")
    json_argument(parser)


def run(args: Namespace) -> int:
    kinds = sorted({entry.kind for entry in cache.files()})
    if args.kind and args.kind not in kinds:
        raise OptionError(f"--kind: no entries of kind {args.kind!r}; there are {', '.join(kinds) or 'none'}")
    return {"size": _size, "list": _list, "clear": _clear}[args.action](args)


def _size(args: Namespace) -> int:
    kinds: dict[str, list[int]] = {}
    for entry in cache.files(args.kind):
        kinds.setdefault(entry.kind, []).append(entry.bytes)
    facts = {kind: {"files": len(sizes), "bytes": sum(sizes)} for kind, sizes in kinds.items()}
    total = sum(fact["bytes"] for fact in facts.values())
    if not write_json(args, {"folder": str(cache.folder()), "kinds": facts, "bytes": total}):
        table = Table("kind", "files", "size", title=f"{cache.folder()}: {size(total)}", title_justify="left")
        for kind, fact in facts.items():
            table.add_row(kind, str(fact["files"]), size(fact["bytes"]))
        console().print(table)
    return 0


def _list(args: Namespace) -> int:
    files = list(cache.files(args.kind))
    rows = [{"kind": e.kind, "name": e.path.name, "bytes": e.bytes, "modified": e.path.stat().st_mtime} for e in files]
    if not write_json(args, rows):
        table = Table("kind", "name", "size", "modified")
        for row in rows:
            moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["modified"]))
            table.add_row(row["kind"], row["name"], size(row["bytes"]), moment)
        console().print(table)
    return 0


def _clear(args: Namespace) -> int:
    removed = cache.clear(args.kind)
    if not write_json(args, {"folder": str(cache.folder()), "removed": removed}):
        console().print(f"removed {removed} files from {cache.folder()}")
    return 0


COMMAND = Command(arguments, run)
