"""What the compiler for spatial machines refuses."""

from __future__ import annotations

from tessera.util.errors import TesseraError


class MapError(TesseraError, RuntimeError):
    """A program cannot be put onto a machine; the message names the operator and the line, or what is missing."""


class SpaceError(MapError):
    """A program does not fit the memory of the cores; the message says what it needs, what there is, and by what."""
