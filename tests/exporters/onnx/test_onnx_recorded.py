"""Plain models leave without torch.export, and their files are the same; what is not plain goes its way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx")

from tessera import onnx  # noqa: E402
from tessera.frontends.export_model import recorded_program  # noqa: E402
from tessera.onnx import captured  # noqa: E402

BATCH = {"x": {0: "batch"}}
X = torch.linspace(-1, 1, 24).view(2, 3, 4)


class Of(nn.Module):
    """A model with a layer, a norm and two buffers, and what `how` makes of them."""

    def __init__(self, how: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.fc, self.norm = how, nn.Linear(4, 4), nn.LayerNorm(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.table, self.seen, self.calls = torch.ones(4), [], 0
        self.register_buffer("sum", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> object:
        return self.how(self, x)


def blocks(m: Of, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = x + block(m.norm(x))
    return x


def writes(m: Of, x: Tensor) -> Tensor:
    m.sum.add_(x.detach().sum((0, 1)))
    return m.fc(x) * m.sum


def attention(m: Of, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in (m.fc(x), x, m.norm(x)))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def asks_whether_exported(m: Of, x: Tensor) -> Tensor:
    return m.fc(x) if torch.compiler.is_exporting() else x


PLAIN: dict[str, Callable] = {
    "blocks": blocks,
    "writes a buffer": writes,
    "attention": attention,
    "sizes": lambda m, x: (m.fc(x).reshape(x.shape[0] * x.shape[1], 4), x.new_zeros(x.shape[0], 2)),
    "a dict": lambda m, x: {"first": m.fc(x), "rest": [x.mean(-1), (x.exp(),)]},
    "an argument back": lambda m, x: (x, m.fc(x)),
    "writes what it made": lambda m, x: m.fc(x).mul_(2)[:, 0].add_(x[:, 0]),
    "whether it is exported": asks_whether_exported,
    "random numbers": lambda m, x: x + torch.rand_like(x),
    "reduced precision": lambda m, x: m.fc(x).to(torch.bfloat16).softmax(-1).float(),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dynamic", [None, BATCH])
def test_the_file_is_the_same(name: str, dynamic: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Of(PLAIN[name]).eval()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    assert recorded_program(model, (X,), {}, dynamic, "Of") is not None
    one = onnx.export(model, (X,), dynamic=dynamic, check=False)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    monkeypatch.setattr(captured, "recorded_program", lambda *_: None)
    assert one == onnx.export(model, (X,), dynamic=dynamic, check=False)


def assigns_a_buffer(m: Of, x: Tensor) -> Tensor:
    m.last = x[0, 0] + m.last
    return x + m.last


def keeps(m: Of, x: Tensor) -> Tensor:
    m.seen.append(1)
    return m.fc(x)


def counts(m: Of, x: Tensor) -> Tensor:
    m.calls += 1
    return m.fc(x)


OTHERS: dict[str, Callable] = {
    "asks about a size": lambda m, x: m.fc(x) if x.shape[0] < 7 else x,
    "a size as a number": lambda m, x: x * int(x.shape[0]),
    "a tensor beside its state": lambda m, x: m.fc(x) + m.table,
    "chooses": lambda m, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),
    "asks for a value": lambda m, x: x if x.sum() > 0 else -x,
    "a layer that lists its weights": lambda m, x: m.lstm(x)[0],
    "assigns a buffer": assigns_a_buffer,
    "keeps something": keeps,
    "counts": counts,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plain_is_left_to_torch_export(name: str) -> None:
    model = Of(OTHERS[name]).eval()
    assert recorded_program(model, (X,), {}, BATCH, "Of") is None
    assert model.calls == 0 and model.seen == [] and not model.last.any()  # as if it had not been tried


def test_one_module_in_two_places() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    assert recorded_program(model, (X,), {}, None, "Sequential") is None


def test_a_compiled_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.ReLU(), backend="eager"))
    assert recorded_program(model, (X,), {}, None, "Sequential") is None


def test_a_tensor_that_is_two_arguments() -> None:
    assert recorded_program(torch.add, (X, X), {}, None, "add") is None
    model = onnx.export(lambda x, y: x - 2 * y, (X, X), check=False)
    assert len(model.graph.input) == 2  # type: ignore[union-attr]
