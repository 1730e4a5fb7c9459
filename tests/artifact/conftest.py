"""What the tests of artifacts share: small models, each exported once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tessera


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.nn.functional.gelu(self.a(self.norm(x))))


@pytest.fixture(scope="session")
def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp().eval()


@pytest.fixture(scope="session")
def mlp_file(mlp: Mlp, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLP with any batch from 1 to 64."""
    path = tmp_path_factory.mktemp("artifact") / "mlp.tess"
    tessera.export(mlp, (torch.randn(8, 16),), path, dynamic={"x": {0: ("batch", 1, 64)}})
    return path
