"""Passes over tile kernels, one a file. `pipeline` lists them and runs them."""
