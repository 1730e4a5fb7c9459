"""The log ladder: lines about compiling on standard error, as many as the flag `log` asks for."""

from __future__ import annotations

import sys

from tessera.util.config import config


def log(level: int, text: object) -> None:
    """Say something if the flag `log` is at least `level`; only then is it made a string."""
    if config.log >= level:
        print(f"tessera: {text}", file=sys.stderr)
