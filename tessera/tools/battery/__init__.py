"""`tessera check --battery`: everything that can be tried on one machine, against eager, in a few minutes.

Nothing is imported here: workers are processes that import their sections, and nothing else.
"""
