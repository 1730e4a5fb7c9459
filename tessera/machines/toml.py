"""The TOML of machine files, which anybody may have written: in a bounded time it becomes tables, or one line."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from tessera.util.errors import MachineError

LONGEST = 1 << 20  # characters of a file
# A key of many parts (a.a.a…), of which the reader takes the square. A look begins at a word and never goes back.
_DEEP = re.compile(r"(?<![\w-])(?:[\w-]++\s*+\.\s*+){16}")


def tables(key: str, text: str) -> dict[str, Any]:
    if len(text) > LONGEST:
        raise MachineError(f"{key}: expected a machine file of at most {LONGEST} characters")
    if deep := _DEEP.search(text):
        line = text.count("\n", 0, deep.start()) + 1
        raise MachineError(f"{key}, line {line}: expected keys of fewer than 16 parts; got {deep[0][:40]!r}…")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # whole numbers of thousands of digits are a ValueError, too
        raise MachineError(f"{key}: expected TOML: {error}") from None
