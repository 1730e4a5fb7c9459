"""The CUDA Tile target."""
