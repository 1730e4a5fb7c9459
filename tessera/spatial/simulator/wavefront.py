"""An array, one wavefront after the other: values move through it a step a cycle.

In: the operands of a product. Out: the product in the array's parts, and the cycles that were counted on the way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tessera.machines.spatial import SpatialMachine


def systolic(held: np.ndarray, streamed: np.ndarray) -> tuple[np.ndarray, int]:
    """[t, R] through a held [R, C]: inputs move right, sums move down. The results [t, C], and the cycles."""
    (rows, columns), many = held.shape, len(streamed)
    inputs, sums, out = np.zeros((rows, columns)), np.zeros((rows, columns)), np.zeros((many, columns))
    for tick in range(many + rows + columns - 2):
        enter = [streamed[tick - r, r] if 0 <= tick - r < many else 0.0 for r in range(rows)]
        inputs = np.column_stack([enter, inputs[:, :-1]])
        sums = np.vstack([np.zeros(columns), sums[:-1]]) + inputs * held
        for c in range(columns):
            if 0 <= tick - (rows - 1) - c < many:
                out[tick - (rows - 1) - c, c] = sums[-1, c]
    return out, rows + many + rows + columns - 2  # a row a cycle to load what is held


def output_stationary(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, int]:
    """[R, t] · [t, C]: x moves right, w moves down, sums stay."""
    (rows, many), columns = x.shape, w.shape[1]
    right, down, sums = (np.zeros((rows, columns)) for _ in range(3))
    for tick in range(many + rows + columns - 2):
        enter = [x[r, tick - r] if 0 <= tick - r < many else 0.0 for r in range(rows)]
        above = [w[tick - c, c] if 0 <= tick - c < many else 0.0 for c in range(columns)]
        right, down = np.column_stack([enter, right[:, :-1]]), np.vstack([above, down[:-1]])
        sums = sums + right * down
    return sums, many + rows + columns - 2


def pad(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))


def product(
    machine: SpatialMachine, x: torch.Tensor, w: torch.Tensor, old: torch.Tensor | None, kind: torch.dtype
) -> tuple[torch.Tensor, int]:
    """Every fold through the array; parts of k are added in order, the old value first."""
    array = machine.matrix
    if array.stationary == "input":  # y^T = w^T · x^T, where x^T is held
        turned, cycles = _folds(machine, w.T, x.T, None if old is None else old.T, kind, systolic)
        return turned.T, cycles
    return _folds(machine, x, w, old, kind, systolic if array.stationary == "weight" else None)


def _folds(
    machine: SpatialMachine,
    x: torch.Tensor,
    w: torch.Tensor,
    old: torch.Tensor | None,
    kind: torch.dtype,
    held: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, int]] | None,
) -> tuple[torch.Tensor, int]:
    array, rows, columns = machine.matrix, machine.matrix.rows, machine.matrix.columns
    xs, ws = x.double().numpy(), w.double().numpy()
    (m, k), n = xs.shape, ws.shape[1]
    total, counted = torch.zeros(m, n, dtype=kind) if old is None else old.clone(), []
    for right in range(0, n, columns):
        for down in range(0, k if held else m, rows):
            columns_now = slice(right, right + columns)
            if held:
                block, stream = pad(ws[down : down + rows, columns_now], rows, columns), xs[:, down : down + rows]
                part, cycles = held(block, pad(stream, m, rows))
                target = (slice(None), columns_now)
            else:
                part, cycles = output_stationary(
                    pad(xs[down : down + rows], rows, k), pad(ws[:, columns_now], k, columns)
                )
                target = (slice(down, down + rows), columns_now)
            counted.append(cycles)
            sums = torch.from_numpy(part)[: total[target].shape[0], : total[target].shape[1]]
            rounded = sums.to(torch.int64).to(kind) if kind == torch.int32 else sums.to(kind)
            first = old is None and (held is None or down == 0)
            total[target] = rounded if first else total[target] + rounded
    if array.loading == "serial":
        return total, sum(counted)
    return total, counted[0] + (len(counted) - 1) * max(m if held else k, rows)
