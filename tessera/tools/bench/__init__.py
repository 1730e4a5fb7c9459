"""`tessera bench`: measurements against peers, in one run on one machine, each beside its target.

Nothing is imported here: suites start processes that import one module of this package and need nothing of the others.
"""
