"""Passes that leave less to do: local rewrites, constants, common subexpressions, dead code."""
