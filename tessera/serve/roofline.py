"""The least time that a step could take on its machine: what it reads at the machine's bandwidth, or what it multiplies
at its rate of products, whichever is more.

In: a model's tensors, what its layers keep of a token, and batches. Out: seconds. Of weights in fewer than 8 bits the
products are counted by their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tessera.machines import Machine, machine_of
from tessera.serve.programs import Paged, Programs
from tessera.serve.scheduler import Work


@dataclass(frozen=True)
class Roofline:
    machine: Machine
    weights: int  # bytes that every step reads
    numbers: int  # of which each is multiplied once for a token
    kept: Sequence[tuple[int, int]]  # bytes of a token in each layer, and how far that looks back (0: to the beginning)

    def seconds(self, works: Iterable[Work]) -> float:
        moved, tokens = self.weights, 0
        for work in works:
            tokens += len(work.tokens)
            for size, window in self.kept:
                moved += size * (min(work.end, window + len(work.tokens)) if window else work.end)
        return max(moved / self.machine.bandwidth, 2 * self.numbers * tokens / self.machine.matrix_flops)


def roofline(programs: Programs) -> Roofline:
    read = list(_read(programs.model))
    kept = [((s.keys[0, 0].nbytes + s.values[0, 0].nbytes), s.window) for s in programs.sites]
    merged = {window: sum(size for size, other in kept if other == window) for _, window in kept}
    return Roofline(
        machine_of(programs.device), sum(t.nbytes for t in read), sum(t.numel() for t in read),
        [(size, window) for window, size in merged.items()],
    )  # fmt: skip


def bytes_of(model: Paged) -> int:
    """Of the weights that a step reads."""
    return sum(tensor.nbytes for tensor in _read(model))


def _read(model: Paged) -> Iterable[Tensor]:
    """A model's weights, without an embedding that is only looked up."""
    if not isinstance(model, nn.Module):
        return {t.data_ptr(): t for entry in model.loaded.entries.values() for t in entry.held}.values()  # type: ignore[attr-defined]
    linear = {id(p) for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - linear
    pools = {"keys", "values"}
    tensors = {id(t): (name, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return [t for i, (name, t) in tensors.items() if i not in looked_up and name.rpartition(".")[2] not in pools]
