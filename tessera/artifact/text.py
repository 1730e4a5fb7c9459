"""JSON from a stranger.

In: bytes. Out: what they say, or `ArtifactError`. Depth, the count of values and the length of numbers are bounded
before anything is built, so that a few bytes cannot become much memory or time.
"""

from __future__ import annotations

import json
import re

from tessera.util.errors import ArtifactError

DEEPEST = 64
MOST_VALUES = 4_000_000
LONGEST_NUMBER = 40  # characters
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[{]|[\]}]")


def read_json(data: bytes, where: str) -> object:
    """`where` names the file and the part of it, for messages."""
    _check(data, where)

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        read = dict(items)
        if len(read) != len(items):
            raise ArtifactError(f"{where}: expected every name once in an object")
        return read

    def whole(text: str) -> int:
        if len(text) > LONGEST_NUMBER:
            raise ArtifactError(f"{where}: a number of {len(text)} digits")
        return int(text)

    try:
        return json.loads(data, object_pairs_hook=pairs, parse_int=whole)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{where}: expected JSON ({str(error)[:120]})") from None


def write_json(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def _check(data: bytes, where: str) -> None:
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MOST_VALUES:
        raise ArtifactError(f"{where}: expected at most {MOST_VALUES} values")
    depth = 0
    for bracket in _BRACKETS.finditer(_STRING.sub(b"", data)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > DEEPEST:
            raise ArtifactError(f"{where}: nested more than {DEEPEST} deep")
