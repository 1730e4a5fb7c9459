"""`tessera check --battery`: everything that can be tried on one machine, against eager, in a few minutes."""

from tessera.tools.battery.command import main, run_battery

__all__ = ["main", "run_battery"]
