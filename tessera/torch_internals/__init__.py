"""PyTorch's private symbols, all of them: what the rest of Tessera uses of PyTorch beyond its public names.

PyTorch may rename, move or drop what stands here in any release, and says nothing when it does. So nobody else mentions
a private symbol of PyTorch (a test keeps that true): a new release is looked through in this folder. One file a
subject; `lookup.symbol` says for each what Tessera does with it, which versions have it, and what happens where one
does not.

Names are handed on, not wrapped: a call of one costs what a call of PyTorch's own does.
"""
