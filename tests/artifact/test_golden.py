"""Files that earlier versions wrote are read still. A new format gets a file of its own here; old ones stay.

python tests/artifact/test_golden.py    # writes the file of the version at hand, and what it answers
"""

from __future__ import annotations

import json
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


def example(rows: int) -> torch.Tensor:
    return torch.linspace(-2, 3, rows * 8).view(rows, 8)


@pytest.mark.parametrize("way", ["kernels", "aten"])
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.tess")), ids=lambda path: path.stem)
def test_golden(path: Path, way: str) -> None:
    answers = json.loads(path.with_suffix(".json").read_text())
    m = tessera.load(path, trust=way == "kernels", compile=False)
    for call, (rows, wanted) in enumerate(answers, 1):
        got = m(example(rows), 2.0)
        assert got["calls"].item() == call
        for key, numbers in wanted.items():
            torch.testing.assert_close(got[key], torch.tensor(numbers), atol=1e-5, rtol=1e-5)


def test_this_version_has_one() -> None:
    assert (GOLDEN / f"v{VERSION}.tess").exists()


def write() -> None:
    torch.manual_seed(0)
    net, path = Net().eval(), GOLDEN / f"v{VERSION}.tess"
    tessera.export(net, (example(4), 2.0), path, dynamic={"x": {0: ("rows", 1, 16)}}, targets=TARGETS)
    with torch.no_grad():
        answers = [(rows, {k: net(example(rows))[k].tolist() for k in ("y", "p")}) for rows in (1, 4, 7)]
    path.with_suffix(".json").write_text(json.dumps(answers))


if __name__ == "__main__":
    write()
