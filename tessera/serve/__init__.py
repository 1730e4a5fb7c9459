"""A generation engine: many requests to one causal language model, through programs that Tessera compiles.

In: a model and requests. Out: tokens. No HTTP here: whatever speaks a protocol stands on `engine.py`.
"""
