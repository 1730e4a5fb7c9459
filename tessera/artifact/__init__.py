"""One file that holds compiled programs, their kernels and weights: written by `write.py`, run by `loaded.py`."""
