"""What the battery is made of: sections of cases, and the outcome of every part of a case.

A section names its cases in the process that leads, and runs them by name in a worker: nothing but names and
outcomes travels between them. A case may have several parts (an operator in place, backward, over strided inputs); each
gives an outcome as soon as it is known, so that a case that is stopped loses only the rest of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

STATUSES = ("pass", "wrong", "error", "timeout", "skipped", "not run")
DETAILS = 6000  # characters of a traceback that are kept
BAD = ("wrong", "error", "timeout")


@dataclass(frozen=True)
class Case:
    """One piece of work. `seconds` is a guess that decides the order; after `limit` seconds it is stopped."""

    section: str
    name: str
    seconds: float = 1.0
    limit: float = 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of one part of a case."""

    section: str
    case: str
    part: str
    status: str
    why: str = ""
    seconds: float = 0.0
    details: str = ""  # the end of the traceback, for the file


class Missing(Exception):
    """A section cannot run here; the message says what is not installed or not there."""


class Skip(Exception):
    """A part has nothing to say here: eager refuses it too, or the operator does not have it."""


class Wrong(Exception):
    """A result differs from eager's."""


Part = tuple[str, Callable[[], None]]  # a name, and what raises Wrong, Skip or an error


@dataclass(frozen=True)
class Section:
    """`cases` gives the cases for a device, or raises `Missing`; `parts` gives the parts of one of them.

    `report` stands where parts are only known once they have run, as those of a test runner.
    """

    cases: Callable[[str], list[Case]]
    parts: Callable[[str, str], Iterator[Part]] | None = None
    report: Callable[[str, str], Iterator[tuple[str, str, str, float, str]]] | None = None


def short(error: BaseException, length: int = 240) -> str:
    """An error on one line."""
    text = f"{type(error).__name__}: {error}" if not isinstance(error, (Wrong, Skip)) else str(error)
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= length else f"{line[: length - 1]}…"
