"""A generation engine: many requests to one causal language model, through programs that Tessera compiles.

In: a model and requests. Out: tokens. The server, in `http/`, stands on `engine.py`; nothing here knows of it.
"""
