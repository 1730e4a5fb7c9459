"""The CPU target: LLVM through llvmlite, vectorised, on the threads PyTorch uses."""

from tessera.tile.targets.cpu.target import CpuKernel, CpuTarget

TARGET = CpuTarget()

__all__ = ["TARGET", "CpuKernel", "CpuTarget"]
