"""`tessera inspect`, `verify`, `sign` and `keys`: what an artifact holds, if it is whole, and who stands behind it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.markup import escape
from rich.table import Table

from tessera.artifact import trust
from tessera.artifact.beside import verify_beside
from tessera.artifact.container import Container
from tessera.artifact.inspect import Facts, facts_of
from tessera.inspection.render import size
from tessera.tools.command import Command, console, json_argument, write_json
from tessera.util.errors import ArtifactError


def _path(parser: ArgumentParser) -> None:
    parser.add_argument("path", help="an artifact")
    json_argument(parser)


# --- inspect ---


def _inspect_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--program", metavar="ENTRY/TARGET", help="print this program, such as main/portable")
    _path(parser)


def _inspect(args: Namespace) -> int:
    with Container.open(args.path) as container:
        facts = facts_of(container)
        if args.program:
            return _program(container, facts, args.program)
    if write_json(args, facts.data):
        return 0
    out = console()
    out.print(f"{args.path}: {facts.head}", soft_wrap=True, markup=False)
    for title, columns, rows in facts.tables():
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(size(cell) if isinstance(cell, int) else escape(cell) for cell in row))
        out.print(table)
    return 0


def _program(container: Container, facts: Facts, name: str) -> int:
    entry, _, target = name.partition("/")
    texts = facts.texts
    if (entry, target) not in texts:
        told = ", ".join("/".join(key) for key in texts)
        raise ArtifactError(f"{container.path}: no program {name!r}; there are {told}")
    console().print(container.read(texts[entry, target]).decode(), soft_wrap=True, markup=False, highlight=False)
    return 0


# --- verify ---


def _verify(args: Namespace) -> int:
    """Every hash, and the verdict. Exit code 1 where the kernels would not be run."""
    with Container.open(args.path) as container:
        for name in container.members:
            container.verify(name)
        verify_beside(container)
        facts_of(container)
        verdict, signed = trust.verdict(container), trust.signers(container)
        members = len(container.members)
    data = {
        "members": members,
        "trusted": verdict.trusted,
        "why": verdict.why,
        "signers": [{"key": s.key, "name": s.name, "state": s.state} for s in signed],
    }
    if not write_json(args, data):
        out = console()
        out.print(f"{args.path}: {members} members, all as they were written", soft_wrap=True, markup=False)
        for signer in signed:
            out.print(f"  signature of {signer.key} {signer.name}: {signer.state}", soft_wrap=True, markup=False)
        told = "its kernels run" if verdict.trusted else "its kernels are left out"
        out.print(f"  {told}: {verdict.why}", soft_wrap=True, markup=False)
    return int(not verdict.trusted)


# --- sign, keys ---


def _sign(args: Namespace) -> int:
    key = trust.sign(args.path)
    if not write_json(args, {"path": args.path, "key": key}):
        console().print(f"{args.path}: signed with {key}", soft_wrap=True, markup=False)
    return 0


def _keys_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trust", metavar="KEY", help="add this public key to the list")
    parser.add_argument("--name", default="", help="whose it is")
    parser.add_argument("--forget", metavar="KEY", help="take this public key off the list")
    json_argument(parser)


def _keys(args: Namespace) -> int:
    if args.trust:
        trust.add_key(args.trust, args.name or "unnamed")
    if args.forget:
        trust.remove_key(args.forget)
    data = {"folder": str(trust.folder()), "own": trust.public_key(), "trusted": trust.trusted_keys()}
    if not write_json(args, data):
        out = console()
        out.print(f"your public key: {data['own']}", soft_wrap=True, markup=False)
        for key, name in trust.trusted_keys().items():
            out.print(f"trusted: {key} {name}", soft_wrap=True, markup=False)
    return 0


INSPECT = Command(_inspect_arguments, _inspect)
VERIFY = Command(_path, _verify)
SIGN = Command(_path, _sign)
KEYS = Command(_keys_arguments, _keys)
