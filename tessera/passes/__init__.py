"""Passes over traces, one per file. Each takes a Trace and gives a Trace that computes the same values."""
