"""What operators mean. Importing this folder registers every declaration."""

from tessera.ops import control

__all__ = ["control"]
