"""The Triton target: tile kernels become readable Triton Python, the default on NVIDIA GPUs."""

from tessera.tile.targets.triton.target import TARGET

__all__ = ["TARGET"]
