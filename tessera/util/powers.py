"""Powers of two, in which blocks of kernels are counted."""

from __future__ import annotations


def power_of_two(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(n - 1, 0).bit_length()


def power_below(n: int) -> int:
    """The largest power of two that is not more; 1 where there is none."""
    return 1 << max(n.bit_length() - 1, 0)
