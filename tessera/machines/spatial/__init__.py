"""Machines without caches or arbiters: the TOML files of docs/machine.md as a tree of plain numbers."""

from tessera.machines.spatial.grid import Core, Edge
from tessera.machines.spatial.read import read
from tessera.machines.spatial.schema import SpatialMachine

__all__ = ["Core", "Edge", "SpatialMachine", "read"]
