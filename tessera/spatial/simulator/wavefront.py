"""An array, one wavefront after the other: values move through it a step a cycle.

In: the operands of a product. Out: the product in the array's parts, and the cycles that were counted on the way.
"""

from __future__ import annotations

import numpy as np
import torch

from tessera.machines.spatial.schema import Matrix


def late(lines: np.ndarray, many: int, ticks: int) -> np.ndarray:
    """So many lines [many, ticks] as they enter an array, each a tick after the one before it."""
    out = np.zeros((many, ticks))
    for number, line in enumerate(lines):
        out[number, number : number + len(line)] = line
    return out


def fold(x: np.ndarray, w: np.ndarray, array: Matrix) -> tuple[np.ndarray, int]:
    """[m, k] · [k, n], and the cycles. x moves right; w stays and sums move down, or w moves down and sums stay."""
    (m, k), n, rows, columns = x.shape, w.shape[1], array.rows, array.columns
    moves = array.stationary == "output"
    ticks = (k if moves else m) + rows + columns - 2
    left, top = late(x if moves else x.T, rows, ticks), late(w.T if moves else w[:0], columns, ticks)
    block, bottom = np.zeros((rows, columns)), np.zeros((ticks, columns))
    if not moves:
        block[:k, :n] = w
    right = down = sums = np.zeros((rows, columns))
    for tick in range(ticks):
        right, down = np.column_stack([left[:, tick], right[:, :-1]]), np.vstack([top[:, tick], down[:-1]])
        sums = sums + right * down if moves else sums
        bottom[tick] = (down := down + right * block)[-1]
    if moves:
        return sums[:m, :n], ticks
    leaves = np.arange(m)[:, None] + rows - 1 + np.arange(n)  # when each sum leaves below
    return np.take_along_axis(bottom[:, :n], leaves, 0), rows + ticks  # a row a cycle to load what stays


def product(
    array: Matrix, x: torch.Tensor, w: torch.Tensor, old: torch.Tensor | None, kind: torch.dtype
) -> tuple[torch.Tensor, int]:
    """Every fold through the array; parts of k are added in order, the old value first."""
    if array.stationary == "input":  # y^T = w^T · x^T, where x^T stays
        x, w, old = w.T, x.T, None if old is None else old.T
    (m, k), n, moves = x.shape, w.shape[1], array.stationary == "output"
    total = torch.full((m, n), -0.0, dtype=kind) if old is None else old.clone()  # -0.0 + x is x, also for -0.0
    xs, ws, counted = x.double().numpy(), w.double().numpy(), []
    for columns in (slice(j, j + array.columns) for j in range(0, n, array.columns)):
        for rows in (slice(i, i + array.rows) for i in range(0, m if moves else k, array.rows)):
            part, cycles = fold(*((xs[rows], ws[:, columns]) if moves else (xs[:, rows], ws[rows, columns])), array)
            whole = torch.from_numpy(part) if kind.is_floating_point else torch.from_numpy(part).to(torch.int64)
            total[rows if moves else slice(None), columns] += whole.to(kind)
            counted.append(cycles)
    later = cycles if array.loading == "serial" else max(k if moves else m, array.rows)
    return total.T if array.stationary == "input" else total, cycles + (len(counted) - 1) * later
