"""The optional TorchInductor executor."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from programs import trace_of

from tessera.executors import inductor
from tessera.executors.claim import claim
from tessera.ir.equation import Special
from tessera.ir.interp import run
from tessera.util.errors import OptionError

# Headers compiled ahead, and trials of which instructions there are, take longer than the kernels of these tests.
PLAIN = {"cpp_cache_precompile_headers": False, "cpp.simdlen": 1, "cpp.vec_isa_ok": False}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Workers side by side do not build in one folder."""
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(PLAIN):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def block(x, w):
    h = F.layer_norm(x @ w, (16,))
    return F.gelu(h) * h.sum(-1, keepdim=True) + x.shape[0], h.t()


@needs_compiler
@pytest.mark.parametrize(
    "dynamic", [pytest.param((), id="static", marks=pytest.mark.sweep), pytest.param((0,), id="symbolic")]
)
def test_region_compiles(dynamic):
    w = torch.randn(16, 16)
    trace = trace_of(block, torch.randn(8, 16), w, dynamic=dynamic)
    after, report = claim(trace, ["inductor", "aten"])
    assert isinstance(after.equations[0].op, Special) and report[0].executor == "inductor"
    for n in (8, 5) if dynamic else (8,):
        x = torch.randn(n, 16)
        for expected, got in zip(run(trace, x, w), run(after, x, w), strict=True):
            torch.testing.assert_close(expected, got)
            assert expected.stride() == got.stride()


def test_not_in_the_default_list():
    _, report = claim(trace_of(block, torch.randn(8, 16), torch.randn(16, 16)), ["sdpa", "aten"])
    assert [c.executor for c in report] == ["aten"]


def test_no_compiler_is_told(monkeypatch):
    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    with pytest.raises(OptionError, match="found no compiler"):
        claim(trace_of(block, torch.randn(8, 16), torch.randn(16, 16)), ["inductor", "aten"])
