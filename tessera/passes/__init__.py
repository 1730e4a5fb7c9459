"""Passes over traces, one per file. Each takes a Trace and gives a Trace that computes the same values."""

from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import lifetimes, peak_memory, schedule

__all__ = ["canonicalise", "cse", "dce", "fold", "lifetimes", "peak_memory", "reinplace", "schedule"]
