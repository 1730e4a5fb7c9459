"""Operators that show their argument's elements, by what they do with them.

The one place that lists them by name; who asks whether an operator shares memory at all asks `schema.is_view`, and
`passes/memory/alias.py` says what may share memory with what in a program. Names are those of PyTorch's packets.
"""

from __future__ import annotations

from tessera.util.names import names

# The same elements in the same order, in another shape.
RESHAPES = names(
    "view reshape _unsafe_view _reshape_alias view_as reshape_as flatten unflatten ravel unsqueeze squeeze"
)
SWAPS = names("transpose t swapaxes swapdims")  # two dimensions exchanged
PERMUTES = SWAPS | names("permute mT numpy_T movedim moveaxis")
PARTS = names(
    "select slice narrow diagonal unfold as_strided"
    " unbind split chunk split_with_sizes tensor_split hsplit vsplit dsplit"
)
REPEATS = names("expand expand_as broadcast_to")  # elements that stand at one address several times
STRIDED = names("as_strided as_strided_copy as_strided_scatter")  # they address memory, not elements
# Views where the layout of the argument allows it, copies otherwise.
MAY_COPY = names("reshape contiguous to flatten type_as expand_as ravel positive reshape_as")
# Their schemas say nothing, and they decompose into nothing; their results are their argument's memory all the same.
UNANNOTATED = names("_unsafe_view _reshape_alias lift_fresh lift unsafe_split unsafe_split_with_sizes")
