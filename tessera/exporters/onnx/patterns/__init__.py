"""Whole operators that a program wrote out by hand."""
