"""Jacobians: a pullback or pushforward, batched over the standard basis.

In: a function and its arguments. Out: for every output leaf, in the outputs' structure, the derivatives by every
chosen argument, in theirs, each of shape `output.shape + argument.shape`. The function itself runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tessera.func.batch import map_inputs
from tessera.func.calls import Argnums, Halves, Pullback, Pushforward
from tessera.ir import fake
from tessera.ir.replay import replay
from tessera.torch_internals import pytree
from tessera.transforms.draws import is_draw, refused_draw
from tessera.util.errors import InputError


def reverse_jacobian(
    func: Callable, args: tuple, argnums: Argnums, has_aux: bool, chunk_size: int | None, copied: bool = False
) -> object:
    _refuse_complex("jacrev", "inputs", pytree.tree_leaves(args))
    if chunk_size is not None and chunk_size <= 0:
        raise InputError(f"jacrev: `chunk_size` should be greater than 0, got {chunk_size}")
    program = Pullback("jacrev", func, args, argnums, has_aux)
    outs = [program.outs[i] for i in program.call.results]
    _refuse_complex("jacrev", "outputs", outs)
    inputs = program.call.primals

    def rows(basis: list[torch.Tensor]) -> list[torch.Tensor]:
        size = basis[0].shape[0]
        return _run_rows(program.halves, program.kept, program.cotangents(basis), size, inputs)

    chunks = _basis(outs, chunk_size)
    columns = _copied(chunks, rows, inputs) if copied and len(chunks) > 1 else _joined(map(rows, chunks))
    by_input = [c.split([o.numel() for o in outs]) for c in columns]
    table = [[by_input[j][i].reshape((*o.shape, *x.shape)) for j, x in enumerate(inputs)] for i, o in enumerate(outs)]
    return _arrange(table, program, has_aux)


def forward_jacobian(func: Callable, args: tuple, argnums: Argnums, has_aux: bool, randomness: str) -> object:
    _refuse_complex("jacfwd", "inputs", pytree.tree_leaves(args))
    program = Pushforward("jacfwd", func, args, argnums, has_aux)
    outs = [program.outs[i] for i in program.call.results]
    _refuse_complex("jacfwd", "outputs", outs)
    drawn = next(filter(is_draw, program.call.trace.equations), None)
    if drawn is not None and randomness == "error":  # one draw serves all columns, but that must be wanted
        raise refused_draw("jacfwd", drawn)
    inputs = program.call.primals
    (basis,) = _basis(inputs, None)
    with program.call.traced.grad_mode():
        columns = _run_rows(program.halves, program.kept, basis, basis[0].shape[0], outs, randomness)
    table = []
    for o, column in zip(outs, columns, strict=True):
        parts = column.movedim(0, -1).split([x.numel() for x in inputs], -1)
        table.append([p.reshape((*o.shape, *x.shape)) for p, x in zip(parts, inputs, strict=True)])
    return _arrange(table, program, has_aux)


def _joined(blocks: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    listed = list(blocks)
    return [torch.cat(c) if len(listed) > 1 else c[0] for c in zip(*listed, strict=True)]


def _copied(chunks: list[list[torch.Tensor]], rows: Callable, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of all chunks, each written to its place as it comes."""
    total = sum(basis[0].shape[0] for basis in chunks)
    columns = [torch.zeros(total, *x.shape, dtype=x.dtype, device=x.device) for x in like]
    start = 0
    for basis in chunks:
        size = basis[0].shape[0]
        for column, block in zip(columns, rows(basis), strict=True):
            column[start : start + size] = block
        start += size
    return columns


def _run_rows(
    halves: Halves,
    kept: list,
    rows: Sequence[torch.Tensor],
    size: int,
    like: Sequence[torch.Tensor],
    randomness: str = "error",
) -> list[torch.Tensor]:
    """The late half for every row of the basis at once; zeros where nothing flows."""
    with fake.alone():
        batched = map_inputs(halves.late, {halves.kept + i: r for i, r in enumerate(rows)}, size, randomness)
    results = replay(batched.trace, [*kept, *rows])
    out = []
    for row, on, x in zip(results, batched.on, like, strict=True):
        if row is None:
            row, on = torch.zeros_like(x), False
        out.append(row if on else row.unsqueeze(0).expand(size, *row.shape))
    return out


def _basis(tensors: Sequence[torch.Tensor], chunk_size: int | None) -> list[list[torch.Tensor]]:
    """Chunks of the standard basis of all tensors together: for each tensor, rows in its own shape."""
    total = sum(t.numel() for t in tensors)
    step = chunk_size or max(total, 1)
    chunks = []
    for start in range(0, max(total, 1), step):
        rows = min(step, total - start)
        chunk, offset = [], 0
        for t in tensors:
            flat = torch.zeros(rows, t.numel(), dtype=t.dtype, device=t.device)
            flat.diagonal(start - offset).fill_(1) if -rows < start - offset < t.numel() else None
            chunk.append(flat.reshape(rows, *t.shape))
            offset += t.numel()
        chunks.append(chunk)
    return chunks


def _arrange(table: list[list[torch.Tensor]], program: Pullback | Pushforward, has_aux: bool) -> object:
    rows = [pytree.tree_unflatten(row, program.call.wrt_spec) for row in table]
    packed = program.call.pack_results(rows)
    return (packed, program.aux) if has_aux else packed


def _refuse_complex(name: str, what: str, leaves: Sequence[object]) -> None:
    if any(isinstance(x, torch.Tensor) and x.is_complex() for x in leaves):
        raise InputError(
            f"{name}: Expected all {what} to be real, got complex ones; use vjp or jvp, whose convention is explicit"
        )
