"""Kernels for a GPU that is not here: compiled to binaries, and launched by a driver that notes what it is told."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import tessera
from tessera.artifact import cuda
from tessera.artifact.container import Container
from tessera.ir.formula import Formula
from tessera.util.errors import ArtifactError, Unserial

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Noting:
    """Stands for a loaded binary."""

    launches: list[tuple] = []

    def __init__(self, image: bytes, name: str, device: torch.device, shared: int) -> None:
        self.image, self.name, self.shared = image, name, shared

    def launch(self, programs: int, threads: int, arguments: list[int]) -> None:
        self.launches.append((self.name, self.image, programs, threads, self.shared, arguments))


class At:
    """A tensor of which only the address matters."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> cuda.CudaKernels:
    monkeypatch.setattr(cuda, "Binary", Noting)
    monkeypatch.setattr(Noting, "launches", [])
    device, rows = torch.device("cuda:0"), [["k", 0, 4, 4, 0, 100, 4], ["k", 4, 4, 8, 0, 0, 8]]
    code = b"ALIGANY."
    return cuda.CudaKernels([cuda._binary(row, code, True, device, "file") for row in rows], units=132)


def test_launches(kernels: cuda.CudaKernels) -> None:
    data = {"both": [0, 1], "programs": ["size", ["FloorDiv", ["Add", "s0", 15], 16]], "persistent": False}
    kernel = kernels.kernel({**data, "symbols": ["s0"]})
    assert kernel is not None and isinstance(kernel.programs, Formula)  # type: ignore[attr-defined]
    kernel([At(64), At(128)], (40,))  # type: ignore[list-item]
    kernel([At(64), At(130)], (40,))  # type: ignore[list-item]
    kernel([At(64), At(128)], (-20,))  # type: ignore[list-item]
    assert Noting.launches == [
        ("k", b"ALIG", 3, 128, 100, [64, 128, 40, 0, 0]),
        ("k", b"ANY.", 3, 256, 0, [64, 130, 40, 0, 0]),
    ]


def test_programs_that_share_their_work_out(kernels: cuda.CudaKernels) -> None:
    kernel = kernels.kernel({"both": [0, 1], "programs": 500, "persistent": True, "symbols": []})
    assert kernel is not None
    kernel([At(0)], ())  # type: ignore[list-item]
    assert Noting.launches[0][2] == 132


@pytest.mark.parametrize("data", [{}, {"both": [0, 7]}, {"both": [0, 1], "programs": "x"}, {"halves": [1, 2]}, 3])
def test_what_is_no_kernel(kernels: cuda.CudaKernels, data: object) -> None:
    full = (
        {"persistent": False, "symbols": [], "programs": 1, **data}
        if isinstance(data, dict) and "both" in data
        else data
    )
    with pytest.raises(Unserial):
        kernels.kernel(full)


@pytest.mark.parametrize(
    "row", [["k", 0, 99, 0, 0, 0, 4], ["k", -1, 4, 0, 0, 0, 4], ["k", 0, 4, 0, 0, 0, 99], ["k", "0"]]
)
def test_what_is_no_binary(row: list) -> None:
    with pytest.raises(ArtifactError, match="expected a binary within 8 bytes"):
        cuda._binary(row, bytes(8), True, torch.device("cuda:0"), "file")


@NEEDS_TRITON
def test_built_without_a_gpu(tmp_path: Path) -> None:
    class Gelu(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x * 2 + 1)

    x, path = torch.randn(4, 32), tmp_path / "m.tess"
    tessera.export(Gelu(), (x,), path, dynamic={"x": {0: "n"}}, targets=["cpu", "cuda:sm_90"])
    torch.testing.assert_close(tessera.load(path, device="cpu")(x), Gelu()(x))
    with Container.open(path) as file:
        target = file.manifest["targets"]["cuda:sm_90"]
        code, program = file.read(target["code"]), file.json("programs/main/cuda-sm_90.json")
    name, cubin, size, _, length, _, warps = target["images"][0]
    assert code[cubin : cubin + 4] == b"\x7fELF" and size > 1000 and length == 0 and warps >= 1
    assert name.encode() in code[cubin : cubin + size]
    assert isinstance(program, dict) and "cuda:0" in str(program["tables"]["types"])
    (kernel,) = program["kernels"]
    assert kernel["kernel"]["symbols"] and kernel["kernel"]["programs"][0] == "size"


@pytest.mark.gpu
@NEEDS_TRITON
def test_on_a_gpu(mlp: torch.nn.Module, tmp_path: Path) -> None:
    x, path = torch.randn(8, 16), tmp_path / "m.tess"
    tessera.export(mlp, (x,), path, dynamic={"x": {0: ("batch", 1, 64)}}, targets=["cpu", "cuda"])
    for device in ("cuda", "cpu"):
        m = tessera.load(path, device=device)
        assert "regions by kernels of the file" in m.explain()
        for rows in (1, 8, 37):
            given = torch.randn(rows, 16)
            with torch.no_grad():
                torch.testing.assert_close(m(given.to(device)).cpu(), mlp(given), atol=1e-4, rtol=1e-4)
    graphed = tessera.load(path, device="cuda", cuda_graph=True)
    assert "replayed as a CUDA graph" in graphed.explain()
    for _ in range(4):
        given = torch.randn(8, 16)
        with torch.no_grad():
            torch.testing.assert_close(graphed(given.cuda()).cpu(), mlp(given), atol=1e-4, rtol=1e-4)
    plain = tessera.load(path, device="cuda", trust=False, compile=False)
    with torch.no_grad():
        torch.testing.assert_close(plain(x.cuda()).cpu(), mlp(x), atol=1e-4, rtol=1e-4)
