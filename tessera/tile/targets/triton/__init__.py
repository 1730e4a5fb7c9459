"""The Triton target: tile kernels become readable Triton Python, the default on NVIDIA GPUs."""
