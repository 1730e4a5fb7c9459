"""`aten._foreach_*` as one operator a tensor.

In: the name and the bound arguments of an operator over lists of tensors. Out: its results, list item by list item, by
the operator of the same name over tensors, so that regions can form; regions of one form then share a launch again. The
norm of every tensor stays whole: reductions are not taken together by kernels of ours, and PyTorch's is few launches.
"""

from __future__ import annotations

from tessera.ir.builder import Builder
from tessera.ir.equation import Arg, Value
from tessera.util.names import names

_PREFIX = "_foreach_"
_LISTED = names(
    """
    add sub mul div maximum minimum clamp_max clamp_min addcmul addcdiv lerp pow sqrt rsqrt neg abs exp log log1p
    log2 log10 expm1 reciprocal sigmoid sign tanh erf erfc sin cos tan floor ceil round trunc frac
    """
)
_VALUE = frozenset(("addcmul", "addcdiv"))  # their last argument is given by name


def foreach_parts(name: str, overload: str, args: list[Arg], kwargs: dict[str, Arg], builder: Builder) -> list | None:
    """The results of every item, or None where this is no such operator."""
    short = name.removeprefix(_PREFIX)
    if short == name or short not in _LISTED or not args or not isinstance(args[0], (list, tuple)):
        return None
    if short in _VALUE and overload == "Tensor":  # its numbers are a tensor on the host
        return None
    results = []
    for k in range(len(args[0])):
        item = [a[k] if isinstance(a, (list, tuple)) else a for a in args]
        named = dict(kwargs)
        if short in _VALUE and len(item) > 3:
            named["value"] = item.pop()
        out = builder.call(short, *item, **named)
        assert isinstance(out, Value)
        results.append(out)
    return results
