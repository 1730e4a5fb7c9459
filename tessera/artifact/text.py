"""JSON from a stranger.

In: bytes. Out: what they say, or `ArtifactError`. Depth, the count of values and the length of numbers are bounded
before anything is built, so that a few bytes cannot become much memory or time. Every step reads the bytes once.
"""

from __future__ import annotations

import json
import re

from tessera.util.errors import ArtifactError

DEEPEST = 64
MOST_VALUES = 500_000
LONGEST_NUMBER = 40  # characters
_STRING = re.compile(rb'"[^"]*"?')  # where no quote is escaped; one without an end goes on to the last byte
_BRACKETS = re.compile(rb"[\[{]|[\]}]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(data: bytes, where: str, most: int = MOST_VALUES) -> object:
    """`where` names the file and the part of it, for messages; `most` says how many values there may be."""
    _check(data, where, most)

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        read = dict(items)
        if len(read) != len(items):
            raise ArtifactError(f"{where}: expected every name once in an object")
        return read

    def whole(text: str) -> int:
        if len(text) > LONGEST_NUMBER:
            raise ArtifactError(f"{where}: a number of {len(text)} digits")
        return int(text)

    try:  # decoded here: json.loads takes UTF-16 too, which the checks do not read
        read = json.loads(data.decode(), object_pairs_hook=pairs, parse_int=whole)
        if _SURROGATE.search(data):  # half a character, which no message could hold
            json.dumps(read, ensure_ascii=False).encode()
        return read
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{where}: expected JSON ({str(error)[:120]})") from None


def count_values(data: bytes) -> int:
    """How many values a JSON text has, or more: brackets and commas in strings count too."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def write_json(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def _check(data: bytes, where: str, most: int) -> None:
    if count_values(data) > most:
        raise ArtifactError(f"{where}: expected at most {MOST_VALUES} values in what is read of a file")
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    depth = 0
    for bracket in _BRACKETS.finditer(_STRING.sub(b"", plain)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > DEEPEST:
            raise ArtifactError(f"{where}: nested more than {DEEPEST} deep")
        if depth < 0:
            raise ArtifactError(f"{where}: expected JSON (a bracket that nothing opened)")
