"""A compiled model runs a program that was edited by hand. Run it: `python examples/edit_a_stage.py`.

The backward program of a small model is saved, one line of it is changed (a gradient is rounded to bfloat16, as a
message to other machines might be), and put back. Forward stays as it was.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import tessera

# %% A compiled model, called once with gradients
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
x = torch.randn(32, 8)
fast = tessera.jit(model)
before = fast(x)
before.sum().backward()
exact = model[0].weight.grad.clone()

# %% Its backward program, as a file that runs by itself
path = Path(tempfile.mkdtemp()) / "backward.py"
tessera.stages(fast)["backward"].save(str(path))
text = path.read_text()
print(text)

# %% The edit: what is returned for the first weight is rounded first
end = text.rindex("    return (")
results = text[end:].removeprefix("    return (").split(",")
weight = results[0].strip()
rounded = f"    {weight} = {weight}.to(torch.bfloat16).to(torch.float32)\n"
path.write_text(text[:end] + rounded + text[end:])
tessera.edit(fast, str(path))

# %% Forward gives what it gave; the first gradient is rounded
model.zero_grad()
after = fast(x)
after.sum().backward()
torch.testing.assert_close(after, before)
torch.testing.assert_close(model[0].weight.grad, exact.bfloat16().float())
assert not torch.equal(model[0].weight.grad, exact)
print("forward is unchanged, and the gradient of the first weight is rounded to bfloat16")
