"""Random whole programs, run by eager PyTorch and by Tessera: `python -m tests.fuzz.run --help`."""
