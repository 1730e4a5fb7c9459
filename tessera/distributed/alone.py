"""What sees the rows of one microbatch, where a pipeline cuts the batch into several: the first rank is told once.

In: what was found (`transforms/pipelined/whole_loss.py`), and who was called. Out: the same as lines for `explain`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from tessera.ir.record import user_line
from tessera.transforms.pipelined.rows import Seen


def warned(seen: Sequence[Seen], call: str, results: str, mesh: DeviceMesh) -> tuple[str, ...]:
    lines: tuple[str, ...] = tuple(
        f"{what.operator} at {what.source}" if what.source.file else what.operator for what in seen
    )
    if seen and mesh.get_rank() == 0:
        first, *others = lines
        more = f" (and {len(others)} more, which explain names)" if others else ""
        warnings.warn(
            f"{user_line()}: {call}: over a pipeline {first} sees the rows of one microbatch{more}, so {results} "
            "and gradients are not those of the whole batch; expected rows that are looked at each alone, and sums, "
            "means or counts of them in a loss that train_step is given",
            stacklevel=2,
        )
    return lines
