"""The CPU target: LLVM through llvmlite, vectorised, on the threads PyTorch uses."""
