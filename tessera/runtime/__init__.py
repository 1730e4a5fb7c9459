"""What stands around a compiled trace when it runs: autograd, aliasing, dispatch."""
