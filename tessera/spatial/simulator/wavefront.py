"""An array, one wavefront after the other: at a tick every cell multiplies and adds at most once.

In: the operands of a product. Out: the product in the array's parts, and the cycles that were counted on the way.
"""

from __future__ import annotations

import numpy as np
import torch

from tessera.machines.spatial.schema import Matrix


def fold(x: np.ndarray, w: np.ndarray, array: Matrix) -> tuple[np.ndarray, int]:
    """[m, k] · [k, n], and the cycles. w stays, lines of x move right and sums down; or x moves right, w down, and sums
    stay. A line comes to the cell of row r and column c r + c ticks after it came to the first one."""
    (m, k), n, sums_stay = x.shape, w.shape[1], array.stationary == "output"
    total, tick, held, lines = np.zeros((m, n)), 0, m if sums_stay else k, k if sums_stay else m
    row, column = np.indices((array.rows, array.columns))
    while (line := tick - row - column)[-1, -1] < lines:  # until the last line has left the last cell
        works = (line >= 0) & (line < lines) & (row < held) & (column < n)
        r, c, at = row[works], column[works], line[works]
        if sums_stay:
            total[r, c] += x[r, at] * w[at, c]
        else:
            total[at, c] += x[at, r] * w[r, c]
        tick += 1
    return total, tick if sums_stay else array.rows + tick  # a row a cycle to load what stays


def product(
    array: Matrix, x: torch.Tensor, w: torch.Tensor, old: torch.Tensor | None, kind: torch.dtype
) -> tuple[torch.Tensor, int]:
    """Every fold through the array; parts of k are added in order, the old value first."""
    if array.stationary == "input":  # y^T = w^T · x^T, where x^T stays
        x, w, old = w.T, x.T, None if old is None else old.T
    (m, k), n, sums_stay = x.shape, w.shape[1], array.stationary == "output"
    total = torch.full((m, n), -0.0, dtype=kind) if old is None else old.clone()  # -0.0 + x is x, also for -0.0
    xs, ws, folds = x.double().numpy(), w.double().numpy(), 0
    for columns in (slice(j, j + array.columns) for j in range(0, n, array.columns)):
        for rows in (slice(i, i + array.rows) for i in range(0, m if sums_stay else k, array.rows)):
            left, top = (xs[rows], ws[:, columns]) if sums_stay else (xs[:, rows], ws[rows, columns])
            part, cycles = fold(left, top, array)
            whole = torch.from_numpy(part) if kind.is_floating_point else torch.from_numpy(part).to(torch.int64)
            total[rows if sums_stay else slice(None), columns] += whole.to(kind)
            folds += 1
    later = cycles if array.loading == "serial" else max(k if sums_stay else m, array.rows)
    return total.T if array.stationary == "input" else total, cycles + (folds - 1) * later
