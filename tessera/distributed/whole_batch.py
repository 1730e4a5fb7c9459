"""A captured loss or call over a microbatch, set beside the same one over the whole batch.

In: both, as they were captured. Out: the program over a microbatch as it must be written so that the mean over all
microbatches is what the whole batch gives. Where a size of the batch is another size too, such as as many rows as
there are columns, simplifying has made two programs of one: then they are compared as they were recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tessera.distributed.capture import Forward, simplified
from tessera.ir.equation import NOWHERE, Value
from tessera.transforms.pipelined.rows import Seen
from tessera.transforms.pipelined.whole_loss import Written, written

OTHER = Seen("a program that depends on how many rows there are", NOWHERE)


def over_whole_batch(
    part: Forward, whole: Forward, microbatches: int, batch: Sequence[Value] = (), buffers: Collection[Value] = ()
) -> Written:
    found = written(part.trace, whole.trace, microbatches, batch, buffers)
    if found is not None:
        return found
    found = written(part.recorded, whole.recorded, microbatches, batch, buffers)
    return Written(part.trace, None, (OTHER,)) if found is None else replace(found, trace=simplified(found.trace))
