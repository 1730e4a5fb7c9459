"""Operators that strangers' models are made of: what the simulator computes is what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera
from tessera.machines.find import spatial_machine
from tessera.spatial.errors import MapError
from tessera.spatial.listing import parse
from tessera.spatial.map import map_onto
from tessera.spatial.simulator import Violation, simulate
from tessera.spatial.simulator.stepper import step
from tessera.util.errors import CaptureError
from tests.spatial.nets import toy

X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
W = torch.sin(torch.arange(240.0)).reshape(4, 60)


def _rows(x: torch.Tensor, n: int) -> torch.Tensor:
    """Places that depend on data, two of them the same."""
    return (x[0, :3] * 3).long().abs() % n


class Many(nn.Module):
    """Several functions of one tensor, so that one program tries them all."""

    def __init__(self, *functions: Callable) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: torch.Tensor) -> list:
        return [f(x) for f in self.functions]


def _ints(x: torch.Tensor) -> torch.Tensor:
    return (x * 40).int()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return (x.tanh().abs() * 120).to(torch.uint8) + 100


GROUPS: dict[str, list[Callable]] = {
    "order": [
        lambda x: x.sort(-1), lambda x: x.sort(0, descending=True), lambda x: x.topk(2, largest=False),
        lambda x: x.topk(2, dim=0), lambda x: x.kthvalue(3), lambda x: x.median(-1), lambda x: x.max(1),
        lambda x: x.min(0), lambda x: x.argmin(-1),
        lambda x: torch.where(x > 0.5, float("nan"), x).sort(-1).values, lambda x: (x > 0).sort(dim=-1, stable=True),
    ],
    "rows": [
        lambda x: x.cumsum(-1), lambda x: x.cumprod(0), lambda x: x.prod(-1), lambda x: (x > 0).cumsum(0),
        lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), lambda x: torch.histc(x, 4, -2, 2),
        lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, right=True),
    ],
    "reads at places": [
        lambda x: x.gather(1, (x[:, :2] * 3).long().abs() % 7), lambda x: x[_rows(x, 5), _rows(x, 7)],
        lambda x: x[:, _rows(x, 7)], lambda x: x.index_select(1, _rows(x, 7)), lambda x: x[_rows(x, 5) - 5, 1:3],
        lambda x: x.reshape(1, 5, 7)[:, _rows(x, 5), :, None], lambda x: x.T[_rows(x, 7)[:, None], _rows(x, 5)],
    ],
    "writes at places": [
        lambda x: torch.zeros(5, 7).scatter(1, (x[:, :2] * 3).long().abs() % 7, 9.0),
        lambda x: x.scatter_add(0, (x[:2] * 3).long().abs() % 5, x[:2]),
        lambda x: x.index_add(0, _rows(x, 5), x[:3], alpha=2), lambda x: x.index_put((_rows(x, 5) * 0,), x[:1]),
        lambda x: x.index_put((_rows(x, 5), _rows(x, 7)), x[0, :3], accumulate=True),
        lambda x: x.scatter_reduce(1, (x * 3).long().abs() % 7, x, "amax"), lambda x: x.masked_fill(x > 0, 2.0),
        lambda x: torch.where(x > 0, 0.0, x).index_copy(1, torch.tensor([1, 3]), x[:, :2]),
    ],
    "windows": [
        lambda x: F.max_pool2d(x[None, None], 3, 2, 1), lambda x: F.avg_pool2d(x[None, None], 3, 2, 1),
        lambda x: F.avg_pool2d(x[None, None], 3, 2, 1, count_include_pad=False), lambda x: F.pad(x, (1, 2), value=3.0),
        lambda x: F.pad(x[None], (1, 2), mode="reflect"), lambda x: F.pad(x[None], (2, 0), mode="replicate"),
        lambda x: F.conv_transpose1d(x[None], W[0, :30].reshape(5, 2, 3), stride=2, padding=1, output_padding=1),
        lambda x: F.conv_transpose1d(x[None, :4], W[0, :24].reshape(4, 2, 3), groups=2, dilation=2),
        lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
        lambda x: F.group_norm(x[None, :4], 2), lambda x: F.max_pool2d(x[None, None], 2, return_indices=True),
    ],
    "numbers": [
        lambda x: (x * 10).int() // 3, lambda x: (x * 10).int() % 3, lambda x: torch.fmod(x, 0.7),
        lambda x: torch.sinh(x), lambda x: (x * 10).int() @ (x * 10).int().T,
        lambda x: (x * 10).long() @ (x * 10).long().T,
        lambda x: torch.round(x, decimals=1), lambda x: torch.log2(x.abs()), lambda x: (x > 0) ^ (x < 1),
        lambda x: torch.cdist(x, x), lambda x: torch.cat([x[:0], x]), lambda x: x.as_strided((3, 3), (7, 2)),
    ],
    "functions": [
        torch.atan, lambda x: torch.asin(x.tanh()), lambda x: torch.acos(x.tanh()), lambda x: torch.atanh(x.sin() / 2),
        torch.asinh, lambda x: torch.acosh(x.abs() + 1), lambda x: torch.erfinv(x.tanh()), torch.special.log_ndtr,
        lambda x: torch.lgamma(x.abs() + 0.1), lambda x: torch.digamma(x.abs() + 0.1), torch.i0, torch.special.i1e,
        lambda x: torch.atan2(x, x.flip(0)), lambda x: torch.copysign(x, x.flip(0)), lambda x: torch.signbit(x * 0),
        lambda x: torch.fmax(x, x.flip(0).log()), lambda x: torch.fmin(x.log(), x), lambda x: torch.angle(x.log()),
    ],
    "bits": [
        lambda x: _ints(x) & 0xF, lambda x: _ints(x) | _ints(x.flip(0)), lambda x: _ints(x) ^ 5, lambda x: ~_ints(x),
        lambda x: _ints(x) << 3, lambda x: _ints(x) >> 2, lambda x: (_bytes(x) & 0xF).to(torch.int8) - 8,
        lambda x: torch.lcm(_ints(x), _ints(x.flip(0))), lambda x: (x > 0) & 3,
    ],
    "integers that leave their type": [
        lambda x: (_bytes(x) + _bytes(x.flip(0))) >> 1, lambda x: ~_bytes(x) > 120,
        lambda x: (_bytes(x) * 3).to(torch.int8) // 3, lambda x: (_bytes(x) - 200) * 0.5,
        lambda x: ((x > 0) + (x < 0.5)) == 1,
    ],
    "integers beside what is asked of floats": [
        lambda x: _ints(x).long() + (1 << 30) + (x > 0), lambda x: torch.where(x > 0, _ints(x) + (1 << 25), _ints(x)),
    ],
}  # fmt: skip


def same(model: nn.Module, *inputs: torch.Tensor, **options: object) -> None:
    with torch.no_grad():
        want = torch.utils._pytree.tree_leaves(model(*inputs))
    program = map_onto(model, *inputs, effort="quick", **options)  # type: ignore[arg-type]
    ran = simulate(program, *inputs)
    assert ran.cycles == program.cycles >= program.bound >= program.limit
    for got, expected in zip(ran.outputs, want, strict=True):
        tolerance = 1e-5 if expected.dtype != torch.bfloat16 else 1e-2
        torch.testing.assert_close(got, expected, rtol=10 * tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("group", GROUPS)
def test_operators_that_have_no_form_are_written_out(group):
    same(Many(*GROUPS[group]), X, machine="toy")


@pytest.mark.parametrize("chosen", [lambda x, i: x[i, i], lambda x, i: x.gather(1, i[:, None])], ids=["two", "gather"])
def test_a_place_outside_of_its_dimension_is_refused_though_the_next_row_is_there(chosen):
    places = torch.tensor([3, 4, 0, 1, 2])
    program = map_onto(lambda x, i: chosen(x, i), X[:, :5].contiguous(), places, machine="toy")
    same_size = X[:, :5].contiguous()
    assert torch.equal(simulate(program, same_size, places).output, chosen(same_size, places))
    with pytest.raises(Violation, match="index: .*expected indices of 0 to"):
        simulate(program, same_size, torch.tensor([3, 5, 0, 1, 2]))


SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, 3.5, -2.5, 1e-30, 1e-6, 10.0, -10.0, 87.0, 1e4, -1e10, 1e30, -3e38]
    + [float("inf"), -float("inf"), float("nan")]
)
OF_SPECIAL: list[Callable] = [
    lambda x: torch.erfc(x), lambda x: torch.special.log_ndtr(x), lambda x: x.median(), lambda x: x.median(0),
    lambda x: x[:20].median(), lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]), right=True), lambda x: x.half().float(),
    lambda x: x.bfloat16().float() + 1, lambda x: x[:18].to(torch.float8_e5m2).float(), lambda x: x.half() == x,
    lambda x: torch.sinh(x), lambda x: torch.cosh(x), lambda x: x.sort().values, lambda x: F.softplus(x),
    lambda x: x.double().expm1().float(), lambda x: x.logsumexp(0), lambda x: x[:18].softmax(0), lambda x: F.mish(x),
]  # fmt: skip
OF_TWO_SPECIAL: list[Callable] = [
    lambda x: torch.hypot(x[:, None], x), lambda x: torch.fmax(x[:, None], x), lambda x: torch.pow(x[:, None], x),
    lambda x: torch.atan2(x[:, None], x), lambda x: torch.logaddexp(x[:, None], x),
    lambda x: torch.xlogy(x[:, None], x),
    lambda x: torch.floor_divide(x[:9, None], x[:9] * 0.1), lambda x: torch.float_power(x[:, None], x),
    lambda x: torch.fmod(x[:9, None], x[:9] * 0.1),
]  # fmt: skip


@pytest.mark.parametrize("functions", [OF_SPECIAL, OF_TWO_SPECIAL], ids=["one", "two"])
def test_zeros_infinities_and_what_is_no_number(functions):
    """Relatively, so that what is small is not taken for 0."""
    model = Many(*functions)
    program = map_onto(model, SPECIAL, machine="toy", effort="quick")
    wanted = torch.utils._pytree.tree_leaves(model(SPECIAL))
    for number, (got, expected) in enumerate(zip(simulate(program, SPECIAL).outputs, wanted, strict=True)):
        told = lambda text, number=number: f"function {number}: {text}"  # noqa: E731
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-30, equal_nan=True, msg=told)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_any_sizes(mode):
    """Where bags begin is data."""
    table, places = torch.randn(20, 6), torch.randint(0, 20, (6,))
    program = map_onto(
        lambda i, o: F.embedding_bag(i, table, o, mode=mode), places, torch.tensor([0, 1, 4]), machine="toy"
    )
    for offsets in ([0, 1, 4], [0, 0, 3], [0, 6, 6]):
        given = places, torch.tensor(offsets)
        torch.testing.assert_close(
            simulate(program, *given).output, F.embedding_bag(given[0], table, given[1], mode=mode)
        )
    same(nn.EmbeddingBag(20, 6, mode=mode, padding_idx=3).eval(), torch.randint(0, 6, (4, 5)), machine="toy")


def test_bilinear_layers():
    both = nn.Bilinear(7, 7, 3).eval()
    same(Many(lambda x: both(x, x.flip(0))), X, machine="toy")


def test_integers_of_64_bits_are_divided_exactly():
    top = 2**63 - 1
    a = torch.tensor(
        [2**53 + 1, -(2**53) - 3, 2**60 + 12345, -(2**61) - 7, top, -top - 1, -top - 1, 2**62 + 3, 1, 0, -5]
    )
    b = torch.tensor([3, -2, 7, -11, 1, 3, 2**62 + 1, 1000003, -top, 9, top])
    _exact(
        lambda a, b: (
            a // b, a % b, torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b), a // 3, a // -7, a % -10,
            torch.fmod(a, 10), (a >> 2).int() // b.int(),
        ),
        a, b,
    )  # fmt: skip


def test_narrow_integers_wrap_before_they_are_combined():
    x = torch.tensor([[-128, 3, 127], [-128, -128, -1]], dtype=torch.int8)
    _exact(lambda x: (x.abs().amax(-1), (-x).amin(-1), (x + x).amax(0), (x * x).argmax(-1), (x - 1).sum(-1)), x)


def test_integers_stay_exact():
    """Where the unit would compute in floats: powers, what rounds, what is padded, quotients inside of operators."""
    x = torch.tensor([2**60 + 1, -(2**60) - 1, 1000003, -7, 46341, 1])
    y = torch.tensor([3, 5, 12, -4, 63, -9])
    _exact(
        lambda x, y: (
            x**3, x**y, 3 ** y.abs(), x**0, x**1, (x % 100).int() ** 5, x.to(torch.int8) ** 3, (-1) ** y, x.floor(),
            x.ceil(), x.trunc(), x.round(), F.pad(x, (1, 2), value=3), torch.lcm(x % 1000, y), x.to(torch.uint8).any(),
            (x * 128).to(torch.uint8).all(),
        ),
        x, y,
    )  # fmt: skip


def _exact(ways: Callable, *given: torch.Tensor) -> None:
    program = map_onto(ways, *given, machine="toy", effort="quick")
    for results in (simulate(program, *given).outputs, step(program.program, *given)[0]):
        for got, expected in zip(results, ways(*given), strict=True):
            assert got.dtype == expected.dtype and got.equal(expected)


def test_adaptive_pools_of_the_largest():
    x = torch.randn(2, 3, 7, 5, 4, generator=torch.Generator().manual_seed(3))
    x[0, 0, 3, 2, 1] = float("nan")
    for size, of in (((3, 4), x[0]), ((2, 3, 4), x)):
        pool = F.adaptive_max_pool2d if len(size) == 2 else F.adaptive_max_pool3d
        same(lambda x, pool=pool, size=size: pool(x, size, return_indices=True), of, machine="toy")
    same(lambda x: F.adaptive_max_pool1d(x, 2), x[0, 0, :, :, 0].contiguous(), machine="toy")


def test_doubles_made_of_floats_are_computed_in_doubles():
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.double() * x.double().exp() - 1

    program = map_onto(model, X, machine="toy")
    torch.testing.assert_close(simulate(program, X).output, model(X), rtol=1e-13, atol=1e-13)


def test_weights_that_are_parts_of_one_tensor_are_read_from_where_they_begin():
    """`W[1]` begins within the storage of W; expanded and laid out as columns it is arranged anew."""
    rows = [torch.tensor([1, 0, 4] * 4), torch.tensor([2, 2, 3] * 4)]

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return sum(F.embedding(i, x[:, :1]).reshape(3, 4) * w for i, w in zip(rows, W[:2, :4], strict=True))

    same(Many(weighted), X, machine="toy")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind):
    torch.manual_seed(0)
    same(kind(6, 8, 2, batch_first=True, bidirectional=kind is nn.GRU).eval(), torch.randn(2, 3, 6), machine="toy")


def test_bags_and_grouped_products():
    torch.manual_seed(0)
    same(nn.EmbeddingBag(20, 8, mode="mean").eval(), torch.randint(0, 20, (3, 5)), machine="toy")
    w = torch.randn(3, 8, 16, dtype=torch.bfloat16)
    ends = lambda x: (x[0, :3].abs() * 1.5).cumsum(0).to(torch.int32)  # noqa: E731
    same(Many(lambda x: torch._grouped_mm(x, w, offs=ends(x))[:4]), torch.rand(16, 8).bfloat16() + 1, machine="toy")


def test_a_model_without_a_weight_to_cut_runs_on_the_cores_of_several_large_chips():
    torch.manual_seed(0)
    assert len(spatial_machine("lpx").cores()) * 4 > 100
    same(nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(5, 13), machine="lpx", chips=2)


class Sized(nn.Module):
    """What its file holds in tensors decides sizes: axes, parts, places."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = x.split([5, 7], -1)
        best, where = x.topk(3, -1)
        return x.mean((0, 1)), left.unsqueeze(0).expand(2, -1, -1) @ right[:5, 1:6], best - y, where, x.roll(2, 1)


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "rows"}}], ids=["fixed", "open"])
def test_files_whose_numbers_decide_sizes(tmp_path, dynamic):
    pytest.importorskip("onnx")
    given = torch.randn(5, 12), torch.randn(5, 3)
    tessera.onnx.export(Sized(), given, tmp_path / "m.onnx", dynamic=dynamic and {**dynamic, "y": {0: "rows"}})
    net = tessera.onnx.load(tmp_path / "m.onnx")
    _agree(net, *given)
    names = dict(zip(net.input_names, given, strict=True))
    by_name = map_onto(net, machine="toy", **{name: names[name] for name in reversed(names)})
    for got, expected in zip(simulate(by_name, *given).outputs, net(*given), strict=True):
        torch.testing.assert_close(got, expected)


def test_models_from_files(tmp_path):
    """An ONNX file, and an artifact whose cache is a state."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20)).eval(), torch.randn(5, 12)
    pytest.importorskip("onnx")
    tessera.onnx.export(model, (x,), tmp_path / "m.onnx")
    same(tessera.onnx.load(tmp_path / "m.onnx"), x, machine="toy")
    tessera.export(model, (x,), tmp_path / "m.tess")
    same(tessera.load(tmp_path / "m.tess"), x, machine="toy")

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(6, 4))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.rows[at] = x
            return self.rows * 2

    given = torch.randn(1, 4), torch.tensor([-2])
    tessera.export(Cache(), given, tmp_path / "c.tess")
    program = map_onto(tessera.load(tmp_path / "c.tess"), *given, machine="toy")
    ran = simulate(program, *given)
    assert torch.equal(ran.output[4], 2 * given[0][0])
    assert torch.equal(simulate(program, given[0], torch.tensor([1]), state=ran.state).output[4], 2 * given[0][0])


def test_sizes_that_depend_on_data_and_too_many_pairs_are_refused():
    with pytest.raises(MapError, match=r"a size that depends on data: expected .* called at .*test_spatial_operators"):
        map_onto(Many(lambda x: x[x > 0]), X, machine="toy")
    with pytest.raises(MapError, match="sorting compares 131,072 × 131,072 elements"):
        map_onto(Many(lambda x: x.sort(-1).values), torch.randn(1, 1 << 17), machine=toy(1, 1))


def test_arguments_that_do_not_fit_the_model_are_told_in_one_line(capfd):
    with pytest.raises(CaptureError, match="does not capture Linear: a and b must have same reduction dim"):
        map_onto(nn.Linear(6, 4), torch.randn(3, 7), machine="toy")
    assert capfd.readouterr().err == ""


def test_what_data_would_decide_is_told_in_one_line_with_its_place_and_a_way_out(capfd):
    ways = {
        "branch": lambda x: x + 1 if x.sum() > 0 else x - 1,
        "count": lambda x: x[:, : int(x.abs().max().item())],
        "loop": lambda x: next(x / n for n in range(1, 99) if (x / n).sum() < 1),
    }
    for way in ways.values():
        with pytest.raises(CaptureError, match=r"on data at .*test_spatial_operators.py:\d+: .*a bucket") as told:
            map_onto(Many(way), X, machine="toy")
        assert "\n" not in str(told.value)
    assert capfd.readouterr().err == ""


def _agree(ways: Callable, *given: torch.Tensor) -> None:
    program = map_onto(ways, *given, machine="toy", effort="quick")
    ran, stepped = simulate(program, *given), step(program.program, *given)
    assert ran.cycles == program.cycles == stepped[1] >= program.bound >= program.limit
    assert parse(str(program)) == program.listing
    for got, again, expected in zip(ran.outputs, stepped[0], ways(*given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(again, got, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_zeros_are_of_the_type_of_what_they_stand_in(dtype):
    x = (X[:4, :4] * 40).to(dtype) + (2**60 if dtype == torch.int64 else 0)
    _agree(lambda x: (x.tril(), x.triu(1), x.tril(-4), x.triu(4) + x, x.triu(4) > x, F.pad(x, (3, 9))), x)


def test_tensors_without_elements():
    _agree(lambda x: (x + 1, x.sum(0), torch.cat([x, torch.ones(1, 3)])), torch.zeros(0, 3))
    _agree(
        lambda x: (
            x[:, :0].sum(-1) + x[:, 0], x[:, :0] @ x[:0, :2], F.linear(x[:, :0], x[:3, :0], x[0, :3]), x[:0].prod(0),
            torch.cat([x[:0], x]), x[:0],
        ),
        X.double(),
    )  # fmt: skip


def test_long_sums_and_chains_are_several_expressions():
    def chain(x: torch.Tensor) -> list[torch.Tensor]:
        total, y = x[0], x
        for i in range(1, 130):
            total, y = total + x[i % 5] * i, y * 1.001 + 0.01
        return [total, y]

    _agree(chain, X)


def test_numbers_are_rounded_as_training_for_few_bits_rounds_them():
    scale, zero = torch.tensor([0.03, 0.2, 0.11, 0.05, 0.07, 0.4, 0.09]), torch.tensor([0, -3, 2, 1, 0, 5, -1]).int()
    for dtype in (torch.float32, torch.bfloat16):
        _exact(
            lambda x: (
                torch.fake_quantize_per_tensor_affine(x, 0.03, 3, -8, 7),
                torch.fake_quantize_per_tensor_affine(x, scale[:1], zero[:1], 0, 15),
                torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -8, 7),
            ),
            X.to(dtype),
        )


def test_both_branches_of_a_condition_are_computed_and_one_is_taken():
    def chosen(x: torch.Tensor) -> tuple:
        y = torch.cond(x.sum() > 0, lambda x: x.exp(), lambda x: x - 1, (x,))
        z = torch.cond(x[0, 0] > 0, lambda x: ((x > 0), x.argmax(-1)), lambda x: ((x < 0), x.argmin(-1)), (x,))
        return y > 1, *z

    _exact(chosen, X)
    _exact(chosen, -X)
