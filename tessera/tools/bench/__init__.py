"""`tessera bench`: measurements against peers, in one run on one machine, each beside its target."""

from tessera.tools.bench.command import COMMAND

__all__ = ["COMMAND"]
