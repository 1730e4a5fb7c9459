"""Copies that only turn what kernels read are not made.

In: a trace whose operators are taken apart. Out: the same program without copies that make rows of columns where only
arithmetic reads them: what follows lies as what was copied. PyTorch's softmax of a transposed matrix lies in rows, and
so its parts end with a copy. Where only kernels and products see it, nobody needs the layout, and kernels that reduce
would not take the copy in (`turns`): what is summed behind it would be written and read again.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.relayout import Relayout
from tessera.ir.schema import is_pointwise
from tessera.ir.trace import Trace
from tessera.passes.fuse.compiler import turns
from tessera.torch_internals.operators import OpOverload
from tessera.util.names import names

# They give small results, or read what lies in rows as well as what lies in columns.
ENDS = names("sum mean amax amin gather mm")
TURNS = names("t transpose permute")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def unturn(trace: Trace) -> Trace:
    """Leave out copies whose layout nobody needs."""
    turned = [eqn for eqn in trace.equations if _is_copy(eqn)]
    if not turned:
        return trace
    rewrite = Relayout(trace)
    spared = {eqn for eqn in turned if _unseen(eqn, rewrite)}
    if not spared:
        return trace
    for eqn in rewrite:
        if eqn in spared:
            rewrite.write(eqn, lambda x=eqn.args[0]: aten.clone(x))
        elif rewrite.moved(eqn):
            rewrite.type_again(eqn)
    return rewrite.finish()


def _is_copy(eqn: Equation) -> bool:
    return eqn.opname == "clone" and eqn.out.dtype in DTYPES and eqn.out.tensor.is_row_major and turns(eqn)


def _unseen(copy: Equation, rewrite: Relayout) -> bool:
    """Only arithmetic reads the copy or a view of it, and what is computed from it ends in sums and products."""
    if any(eqn.opname in ENDS for eqn in rewrite.users.get(copy.out, ())):
        return False  # it may have been made for that reader
    seen: set[Value] = set()
    stack = [copy.out]
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in rewrite.results:
            return False
        for eqn in rewrite.users.get(v, ()):
            if _by_element(eqn) or eqn.opname in TURNS:
                stack += eqn.results()
            elif eqn.opname not in ENDS:
                return False
    return True


def _by_element(eqn: Equation) -> bool:
    copies = eqn.opname == "_to_copy" and "memory_format" not in eqn.kwargs
    return isinstance(eqn.op, OpOverload) and (copies or is_pointwise(eqn.op))
