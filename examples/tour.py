"""A walk through every stage of Tessera on a ten-line model. Run it: `python examples/tour.py`.

Each step prints a program you could read, run, edit and put back; the asserts say what is true of it.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

import tessera


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


def main() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)

    title("1. A trace: the model as Python over PyTorch's own operators")
    trace = tessera.trace(model, x)
    print(trace)
    assert "aten.layer_norm" in str(trace)  # high-level operators stay whole

    title("2. The printed trace runs by itself")
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "model.py")
    trace.save(path)
    scope: dict = {}
    with open(path) as file:
        exec(file.read(), scope)
    (out,) = scope["Model"](x)
    assert torch.equal(out, model(x))
    print(f"{path} gives what the model gives")

    title("3. Compile and train; every stage of it is kept")
    fast = tessera.jit(model, strict=True)
    loss = fast(x).pow(2).mean()
    loss.backward()
    stages = tessera.stages(fast)
    print(", ".join(stages.names()))
    assert torch.allclose(loss, model(x).pow(2).mean())

    title("4. Forward and backward, with what is saved between them")
    print(stages["forward"].trace)
    print(stages["backward"].trace)

    title("5. What a pass changed")
    print(stages.diff("vjp", "joint cse") or "nothing")

    title("6. Edit a stage by hand: GELU becomes ReLU")
    before = fast(x)
    path = os.path.join(folder, "edited.py")
    stages["captured"].save(path)
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("aten.gelu(", "aten.relu("))
    tessera.edit(fast, path)
    after = fast(x)
    assert not torch.allclose(before, after)
    assert torch.allclose(after, x + model.down(F.relu(model.up(model.norm(x)))))
    print("the compiled model now runs the edited program, forward and backward")

    title("7. Transforms compose: per-sample gradients and a Hessian")

    def sample_loss(weight: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (row @ weight).tanh().sum()

    weight = torch.randn(8, 3)
    per_sample = tessera.vmap(tessera.grad(sample_loss), in_dims=(None, 0))(weight, x)
    assert per_sample.shape == (4, 8, 3)
    curvature = tessera.hessian(lambda row: sample_loss(weight, row))(x[0])
    assert curvature.shape == (8, 8) and torch.allclose(curvature, curvature.T, atol=1e-5)
    print(tessera.trace(tessera.grad(sample_loss), weight, x[0]))

    title("8. What happened, in words")
    print(tessera.explain(fast))

    title("9. A machine without caches: what every core does in which cycle")
    program = tessera.map_onto(model, x, machine="toy")
    print(program.core(0, 0))
    ran = tessera.simulate(program, x)  # knows the listing and the machine's file, nothing of the compiler
    assert ran.cycles == program.cycles >= program.bound
    assert torch.allclose(ran.output, model(x), atol=1e-5)
    print(program.summary())


if __name__ == "__main__":
    main()
