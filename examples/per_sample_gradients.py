"""The gradient of every sample, by vmap of grad. Run it: `python examples/per_sample_gradients.py`.

Differential privacy clips each sample's gradient before they are summed; a loop over samples would compute them one
by one. Two transforms make one batched program of it, and jit compiles that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.func import functional_call

import tessera

# %% A model as a function of its parameters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
parameters = {name: p.detach() for name, p in model.named_parameters()}
x, y = torch.randn(64, 16), torch.randint(4, (64,))


def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of one sample."""
    return F.cross_entropy(functional_call(model, parameters, (x,)), y)


# %% Per-sample gradients: the gradient, batched over the samples and not over the parameters
per_sample = tessera.vmap(tessera.grad(loss), in_dims=(None, 0, 0))
grads = per_sample(parameters, x, y)
print({name: tuple(g.shape) for name, g in grads.items()})

# %% The same as one gradient a sample
for i in (0, 17):
    alone = tessera.grad(loss)(parameters, x[i], y[i])
    for name in parameters:
        torch.testing.assert_close(grads[name][i], alone[name])


# %% Clip every sample to a norm of one, then average: compiled as one program. The function is pure, so that it can be
# traced by running it; with the default frontend, TorchDynamo would put torch.func's transforms in place of ours.
@tessera.jit(frontend="functional")
def private_gradient(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    grads = per_sample(parameters, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    scale = (1 / norms).clamp(max=1)
    return {name: (g * scale.view(-1, *[1] * (g.ndim - 1))).mean(0) for name, g in grads.items()}


clipped = private_gradient(parameters, x, y)
total = torch.stack([g.norm() for g in clipped.values()]).norm()
assert total <= 1
print(f"norm of the clipped mean: {total:.3f}")
print(tessera.stages(private_gradient)["captured"].trace)
