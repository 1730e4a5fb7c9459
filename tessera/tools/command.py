"""The shape of a subcommand: a line of help, its arguments, and what runs and gives the exit code."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One entry of the command line."""

    help: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
