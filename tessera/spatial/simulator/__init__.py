"""The judge of listings: runs them on data, to the cycle, and refuses the first violation.

It is written from docs/machine.md and shares with the compiler the grammar of listings and the machine files, nothing
else.
"""

from tessera.spatial.simulator.api import Simulation, cost, simulate
from tessera.spatial.simulator.judge import judge
from tessera.spatial.simulator.report import Report
from tessera.spatial.simulator.violation import KINDS, Violation

__all__ = ["KINDS", "Report", "Simulation", "Violation", "cost", "judge", "simulate"]
