"""The tile compiler: fused regions of a trace become kernels for CPUs and NVIDIA GPUs."""
