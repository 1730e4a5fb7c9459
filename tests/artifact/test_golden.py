"""Files that earlier versions wrote are read still. A new format gets a file of its own here; old ones stay.

python tests/artifact/test_golden.py NAME    # writes a file of the version at hand, and what it answers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import tessera
from tessera.artifact.container import VERSION

GOLDEN = Path(__file__).parent / "golden"
TARGETS = ["cpu:aarch64", "cpu:x86-64-v3"]


class Net(torch.nn.Module):
    """A norm, a layer, an activation, a softmax and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        y = torch.nn.functional.gelu(self.layer(self.norm(x))) * scale
        return {"y": y, "p": torch.softmax(y, -1), "calls": self.calls + 0}


class Chooses(torch.nn.Module):
    """Sizes known only when it runs, a claim about one, a convolution, attention and rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = torch.nn.Embedding(8, 8), torch.nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        count = (x[0, 0] < 0).long().item()
        torch._check(count >= 0)
        torch._check(count <= x.shape[0])
        heads = (x + self.table(torch.arange(8)).sum(0)).view(1, x.shape[0], 2, 4).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return {"y": self.conv(x[:, None]) * scale, "p": attended, "chosen": x[x > 0], "first": x[:count]}


def example(rows: int) -> torch.Tensor:
    return torch.linspace(-2, 3, rows * 8).view(rows, 8)


@pytest.mark.parametrize("way", ["kernels", "aten"])
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.tess")), ids=lambda path: path.stem)
def test_golden(path: Path, way: str) -> None:
    answers = json.loads(path.with_suffix(".json").read_text())
    m = tessera.load(path, trust=way == "kernels", compile=False)
    for call, (rows, wanted) in enumerate(answers, 1):
        got = m(example(rows), 2.0)
        assert got.get("calls", torch.tensor(call)).item() == call
        for key, numbers in wanted.items():
            torch.testing.assert_close(got[key], torch.tensor(numbers), atol=1e-5, rtol=1e-5)


def test_this_version_has_one() -> None:
    assert (GOLDEN / f"v{VERSION}.tess").exists()


# What is in the folder: a file's name, what made it, and where its weights lie. The PyTorch that writes a file is part
# of what is tested: `v1_torch_2_11` was written with 2.11, the others with 2.13.
FILES: dict[str, tuple[type[torch.nn.Module], str | None]] = {
    "v1": (Net, None),
    "v1_sizes": (Chooses, "v1_sizes.safetensors"),
    "v1_torch_2_11": (Chooses, None),
}


def write(name: str) -> None:
    torch.manual_seed(0)
    make, weights = FILES[name]
    net, path = make().eval(), GOLDEN / f"{name}.tess"
    dynamic = {"x": {0: ("rows", 1, 16)}}
    tessera.export(net, (example(4), 2.0), path, dynamic=dynamic, targets=TARGETS, weights=weights)
    with torch.no_grad():
        results = [(rows, net(example(rows))) for rows in (1, 4, 7)]
    answers = [(rows, {k: x.tolist() for k, x in out.items() if k != "calls"}) for rows, out in results]
    path.with_suffix(".json").write_text(json.dumps(answers))


if __name__ == "__main__":
    write(sys.argv[1])
