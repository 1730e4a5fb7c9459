"""The kernels that choose tokens beside PyTorch's operators. Prints how many rows agreed.

Run as a program with TRITON_INTERPRET=1, the kernels run as Python on the CPU; `test_sampling_kernels` does that, and
calls `check` itself on a GPU.
"""

from __future__ import annotations

import torch

from tessera.serve import sampling_kernels
from tessera.serve.sampling import Draw, Sampling, choose, rows_of

ROWS = 24


def check(device: str, dtype: torch.dtype) -> int:
    """Rows of several temperatures, some with NaN, infinities or few tokens to choose from."""
    agreed = 0
    for vocabulary in (50, 9000):  # one part, and three
        torch.manual_seed(vocabulary)
        logits = (4 * torch.randn(ROWS, vocabulary)).to(dtype)
        logits[3, 7] = float("nan")
        logits[4] = float("-inf")
        logits[5, :-1] = float("-inf")
        logits[6, 20:] = float("-inf")
        logits[7, 9] = float("inf")
        logits[8, 11] = logits[8, 13] = 90.0  # equals: the first is taken, or either is drawn
        for temperatures in ((0.0,), (0.7, 0.0, 1.0, 1e-9, 30.0)):
            settings = [Sampling(temperature=temperatures[i % len(temperatures)]) for i in range(ROWS)]
            draws = [Draw(s, seed=i * 2**61 - 5, answer=i % 3) for i, s in enumerate(settings)]
            rows = rows_of(draws, range(ROWS))
            asked = (None if x is None else x.to(device) for x in (rows.temperature, rows.seed, rows.counter))
            ours = sampling_kernels.choose(logits.to(device), *asked).cpu()
            torch.testing.assert_close(ours, choose(logits, rows))
            assert (ours[[3, 4, 7]] == -1).all() and ours[5] == vocabulary - 1
            agreed += ROWS
    return agreed


if __name__ == "__main__":
    print(check("cpu", torch.float32))
