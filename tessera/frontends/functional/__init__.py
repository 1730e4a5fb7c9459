"""Plain Python functions over tensors become Traces, by running them once."""
