"""Operators written out as parts that kernels can hold."""
