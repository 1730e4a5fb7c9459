"""Weights on their way to a GPU: the pieces, and on a GPU that all of them arrive."""

from __future__ import annotations

import pytest
import torch

from tessera.artifact import upload

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(37, 53) * 9).to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(3.5), "turned": torch.randn(40, 50).t()}
    return tensors | {"large": torch.randn(1 << 18)}


@pytest.mark.parametrize("piece", [1, 7, 100, 1 << 20])
def test_pieces_are_all_bytes_once(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(upload, "PIECE", piece)
    for here in [x[:5] for x in weights().values() if x.is_contiguous() and x.ndim == 2 and x.numel()]:
        there = torch.zeros_like(here)
        for to, of in upload.pieces(there, here):
            assert 0 < len(to) <= piece
            to.copy_(of)
        assert torch.equal(there.view(torch.uint8), here.view(torch.uint8))


def test_elsewhere_than_on_a_gpu_tensors_stay_in_the_files_pages() -> None:
    tensors = weights()
    assert all(x is tensors[name] for name, x in upload.uploaded(tensors, torch.device("cpu")).items())


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1 << 12, 16 << 20])
def test_weights_arrive(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(upload, "PIECE", piece)
    monkeypatch.setattr(upload, "SMALL", 1)
    tensors = weights()
    for name, x in upload.uploaded(tensors, torch.device("cuda", 0)).items():
        assert (x.dtype, x.shape, x.stride()) == (tensors[name].dtype, tensors[name].shape, tensors[name].stride())
        assert x.is_cuda and torch.equal(x.cpu().to(torch.complex64), tensors[name].to(torch.complex64))
