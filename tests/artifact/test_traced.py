"""An artifact's program that somebody traces, to compile it here or to export it again: control flow stays in it."""

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import tessera

torch.manual_seed(0)


def branches(x):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - x.shape[0], (x,))


def turns(x):
    start = torch.zeros((), dtype=torch.int64), x.abs()
    return while_loop(lambda i, y: (y.sum() < 100) & (i < 20), lambda i, y: (i + 1, y * 2 + 1), start)


def backwards(x):
    return scan(lambda c, row: (c * 0.5 + row, c + row * 2), torch.zeros(3), x, reverse=True)


CALLS = [torch.rand(4, 3), -torch.rand(4, 3), torch.randn(7, 3) * 9]


@pytest.mark.parametrize("model", [branches, turns, backwards])
def test_control_flow_stays_in_a_program_that_is_compiled_again(model, tmp_path):
    path = tmp_path / "m.tess"
    tessera.export(model, (CALLS[0],), path, dynamic={"x": {0: "rows"}})
    m = tessera.load(path, trust=False, compile=True)
    for x in CALLS:
        torch.testing.assert_close(m(x), model(x))
    assert "compiled on this machine" in m.explain()


@pytest.mark.parametrize("model", [branches, turns])
def test_control_flow_stays_in_a_program_that_is_exported_again(model, tmp_path):
    path = tmp_path / "m.tess"
    tessera.export(model, (CALLS[0],), path)
    again = torch.export.export(tessera.load(path).module(), (CALLS[0],)).module()
    for x in CALLS[:2]:
        torch.testing.assert_close(again(x), model(x))


def test_what_a_program_raises_is_raised_by_one_that_is_compiled_again(tmp_path):
    def model(x):
        torch._assert_async((x < 50).all(), "too large")
        return x * 2

    tessera.export(model, (CALLS[0],), tmp_path / "m.tess")
    m = tessera.load(tmp_path / "m.tess", trust=False, compile=True)
    assert m(CALLS[0]).equal(CALLS[0] * 2)
    with pytest.raises(RuntimeError, match="too large"):
        m(CALLS[0] * 1000)
