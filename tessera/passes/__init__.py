"""Passes over traces, one per file. Each takes a Trace and gives a Trace that computes the same values."""

from tessera.passes.canonicalise import canonicalise
from tessera.passes.cse import cse
from tessera.passes.dce import dce
from tessera.passes.fold import fold
from tessera.passes.reinplace import reinplace
from tessera.passes.schedule import lifetimes, peak_memory, schedule

__all__ = ["canonicalise", "cse", "dce", "fold", "lifetimes", "peak_memory", "reinplace", "schedule"]
