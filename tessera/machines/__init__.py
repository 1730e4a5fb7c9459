"""What machines are: their figures, and where each comes from. One TOML file a machine, in `data/`."""

from tessera.machines.describe import Machine, known, machine
from tessera.machines.here import machine_of

__all__ = ["Machine", "known", "machine", "machine_of"]
