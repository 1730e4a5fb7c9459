"""The CUDA Tile target."""

from tessera.tile.targets.cuda_tile.target import CudaTile, CudaTileKernel

__all__ = ["TARGET", "CudaTile", "CudaTileKernel"]

TARGET = CudaTile()
