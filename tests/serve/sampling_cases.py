"""The kernels that choose tokens beside PyTorch's operators. Prints how many rows agreed.

Run as a program with TRITON_INTERPRET=1, the kernels run as Python on the CPU; `test_sampling_kernels` does that, and
calls `check` itself on a GPU.
"""

from __future__ import annotations

import sys

import torch

from tessera.serve import sampling_kernels
from tessera.serve.sampling import Draw, Sampling, choose, rows_of
from tessera.serve.sampling_aten import cut

ROWS, CUT_ROWS = 24, 12


def logits_of(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Some rows have NaN, infinities or few tokens to choose from; others many that are equal."""
    torch.manual_seed(vocabulary)
    logits = (4 * torch.randn(ROWS, vocabulary)).to(dtype)
    logits[3, 7] = float("nan")
    logits[4] = float("-inf")
    logits[5, :-1] = float("-inf")
    logits[6, 20:] = float("-inf")
    logits[7, 9] = float("inf")
    logits[8, 11] = logits[8, 13] = 90.0  # equals: the first is taken, or either is drawn
    logits[9] = logits[9].round()
    logits[10] = 2.0
    logits[11] = torch.where(logits[11] > 0, 0.0, -0.0)
    return logits


# top_k, top_p, min_p
SETTINGS = ((0, 0.9, 0.0), (0, 0.03, 0.0), (7, 1.0, 0.0), (1, 1.0, 0.02), (0, 1.0, 0.02), (7, 0.9, 0.6), (7, 0.5, 0.02))


def check_cuts(device: str, dtype: torch.dtype, settings: tuple = SETTINGS) -> int:
    """Rows that leave out the tokens that they would leave out if they were sorted."""
    agreed = 0
    for vocabulary, kinds in ((50, settings), (3000, settings[:1])):  # one tile, and two
        logits = logits_of(vocabulary, dtype)[:CUT_ROWS]
        fine = torch.ones(CUT_ROWS, dtype=torch.bool)
        fine[[3, 4, 7]] = False  # no token is chosen there
        for top_k, top_p, min_p in kinds:
            asked = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
            settings = [Sampling(temperature=0.3 + i % 4, **asked) for i in range(CUT_ROWS)]
            rows = rows_of([Draw(s) for s in settings], range(CUT_ROWS))
            assert rows.temperature is not None and rows.cuts is not None
            temperature, *cuts = (x.to(device) for x in (rows.temperature, *rows.cuts))
            found = sampling_kernels.bounds(logits.to(device), temperature, (cuts[0], cuts[1], cuts[2]))
            least, last = (x.cpu()[:, None] for x in found)
            left = (logits > least) | ((logits == least) & (torch.arange(vocabulary) <= last))
            left &= logits > float("-inf")
            assert torch.equal(left[fine], (cut(logits, rows.temperature, rows.cuts) > float("-inf"))[fine]), asked
            agreed += CUT_ROWS
    return agreed


def check(device: str, dtype: torch.dtype) -> int:
    """Rows of several temperatures; some leave tokens out."""
    agreed = 0
    for vocabulary in (50, 9000):  # one part, and three
        logits = logits_of(vocabulary, dtype)
        for temperatures in ((0.0,), (0.7, 0.0, 1.0, 1e-9, 30.0)):
            settings = [
                Sampling(temperature=temperatures[i % len(temperatures)], top_p=0.8 if i in (2, 9, 14) else 1.0)
                for i in range(ROWS)
            ]
            draws = [Draw(s, seed=i * 2**61 - 5, answer=i % 3) for i, s in enumerate(settings)]
            rows = rows_of(draws, range(ROWS))
            temperature, seed, counter, *cuts = (
                None if x is None else x.to(device)
                for x in (rows.temperature, rows.seed, rows.counter, *(rows.cuts or ()))
            )
            ours = sampling_kernels.choose(logits.to(device), temperature, seed, counter, tuple(cuts) or None).cpu()  # type: ignore[arg-type]
            torch.testing.assert_close(ours, choose(logits, rows))
            assert (ours[[3, 4, 7]] == -1).all() and ours[5] == vocabulary - 1
            agreed += ROWS
    return agreed


if __name__ == "__main__":
    most = int(sys.argv[1])  # settings of each type
    cuts = [check_cuts("cpu", torch.float32, SETTINGS[:most]), check_cuts("cpu", torch.bfloat16, SETTINGS[-most:])]
    print(check("cpu", torch.float32), *cuts)
