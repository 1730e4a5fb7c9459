"""Triton programs over few rows. `linear` and `attention` launch them; the others are the programs. All need Triton."""
