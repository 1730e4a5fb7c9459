"""Operators in place that promote to a type their target cannot hold are refused, as eager refuses them."""

import pytest
import torch

import tessera

WRITES = {
    "mul_": lambda x: x.mul_(0.5),
    "mul_ of a view": lambda x: x[0].mul_(0.5),
    "mul_ of a detached one": lambda x: x.detach().mul_(-0.0),
    "mul_ by a tensor": lambda x: x.mul_(torch.ones(3)),
    "add_": lambda x: x.add_(1.5),
    "addcmul_": lambda x: x.addcmul_(torch.ones(3), torch.ones(3)),
    "logit_": lambda x: x.logit_(0.1),
    "out=": lambda x: torch.mul(x, 0.5, out=x),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("name", WRITES)
def test_a_float_is_not_written_to_integers(name: str, dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        WRITES[name](x)
        return x

    x = torch.ones(3, 3, dtype=dtype)
    with pytest.raises(RuntimeError, match="can't be cast"):
        program(x.clone())
    with pytest.raises(RuntimeError, match="can't be cast"):
        tessera.jit(program)(x.clone())


def test_what_eager_casts_is_still_written() -> None:
    def program(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n.copy_(x)
        return x.eq_(1.5), n.mul_(2), n[0].fill_(2.7), n.masked_fill_(n > 3, 4.5)

    def given() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([1.5, 2.5]), torch.zeros(2, dtype=torch.int64)

    for ours, eager in zip(tessera.jit(program)(*given()), program(*given()), strict=True):
        assert ours.dtype == eager.dtype and torch.equal(ours, eager)
