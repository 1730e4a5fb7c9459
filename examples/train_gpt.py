"""A GPT is trained with the whole step as one program. Run it: `python examples/train_gpt.py [steps]`.

Forward, loss, backward, clipping and AdamW's update are captured together; what a learning-rate schedule changes is
handed over at each call, so nothing is compiled again. The text is sums such as `3+4=07;`.
"""

from __future__ import annotations

import sys

import torch

import tessera
from tessera.tools.models import GPT, GPTConfig

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
CHARACTERS = "0123456789+=;"

# %% The data: every line is four sums, targets are one character further
torch.manual_seed(0)


def batch(size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.randint(10, (size, 4, 2)).tolist()
    lines = ["".join(f"{a}+{b}={a + b:02d};" for a, b in row) for row in pairs]
    tokens = torch.tensor([[CHARACTERS.index(c) for c in line] for line in lines])
    return tokens[:, :-1], tokens[:, 1:]


# %% The model, its optimizer and the compiled step
model = GPT(GPTConfig(layers=2, width=64, heads=4, context=27, vocab=len(CHARACTERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
step = tessera.train_step(model, None, optimizer, clip_norm=1.0)  # None: the model itself gives the loss

# %% Train
losses = []
for i in range(STEPS):
    losses.append(float(step(*batch())))
    schedule.step()
    if i % 20 == 0 or i == STEPS - 1:
        print(f"step {i:4d}  loss {losses[-1]:.3f}")
assert losses[-1] < losses[0]

# %% What ran: one program; its end is the update of the parameters
print(tessera.explain(step))
print("\n".join(str(tessera.stages(step)[-1]).splitlines()[-6:]))
