"""Models on spatial machines: the simulator gives PyTorch's answer, in the very cycles that were scheduled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera
from tessera.machines.find import spatial_machine
from tessera.spatial import interpreter
from tessera.spatial.errors import MapError, SpaceError
from tessera.spatial.listing import parse
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.schedule import searched
from tessera.spatial.simulator.api import simulate
from tessera.spatial.simulator.stepper import step
from tessera.torch_internals.operators import scaled_mm
from tessera.util.errors import CaptureError, OptionError
from tests.spatial.nets import MLP, Attention, Block, Many, convolutions, toy

MACHINES = {
    "toy": lambda: spatial_machine("toy"),
    "1x1": lambda: toy(1, 1),
    "4x4": lambda: toy(4, 4),
    "systolic": lambda: spatial_machine("systolic"),
    "wormhole": lambda: spatial_machine("wormhole"),
}
MODELS = {
    "mlp": (lambda: MLP(32, 48), (16, 32)),
    "attention": (Attention, (2, 9, 32)),
    "block": (Block, (1, 12, 32)),
    "convolutions": (convolutions, (1, 3, 7, 7)),
    "many": (Many, (3, 5, 7)),
}


def agree(model: object, inputs: tuple[torch.Tensor, ...], program: SpatialProgram, tolerance: float) -> None:
    with torch.no_grad():
        expected = model(*inputs)  # type: ignore[operator]
    expected = expected if isinstance(expected, tuple) else (expected,)
    given = simulate(program, *inputs)
    assert given.cycles == program.cycles
    assert program.cycles >= program.bound >= program.limit
    for got, want in zip(given.outputs, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, machine: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    agree(model, (x,), map_onto(model, x, machine=MACHINES[machine](), effort="quick"), 1e-5)


def test_what_would_be_done_on_another_machine_is_tried_too() -> None:
    """Of two ways the shorter one; where memory is too small for a machine's own, the other's."""
    torch.manual_seed(0)
    model, x = Block(32, 4), torch.randn(1, 16, 32)
    for machine, like in ((toy(2, 2), toy(2, 2, width='"8 B"')), (toy(2, 2, width='"8 B"'), toy(2, 2))):
        alone, both = (map_onto(model, x, machine=machine, effort="quick", like=of) for of in (None, like))
        assert both.cycles <= alone.cycles
        agree(model, (x,), both, 1e-5)
    with pytest.raises(OptionError, match="like: expected a machine with the same cores as toy2x2, got toy"):
        map_onto(model, x, machine=toy(2, 2), like=toy(1, 2))


@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (17, 257, 1), (257, 17, 33), (1, 257, 17)])
def test_odd_products_in_float64(m: int, k: int, n: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(k, n).double(), torch.randn(m, k, dtype=torch.float64)
    agree(model, (x,), map_onto(model, x, machine="toy", effort="quick"), 1e-12)


def test_blocks_of_padding_alone_have_the_type_of_what_is_padded() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 3, padding=6).double(), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    agree(model, (x,), map_onto(model, x, machine=toy(2, 2), effort="quick"), 1e-12)
    numbers = torch.randint(-(2**40), 2**40, (4, 8))
    padded = lambda x: F.pad(x, (0, 0, 6, 6)) + F.pad(x, (0, 0, 0, 12))  # noqa: E731
    agree(padded, (numbers,), map_onto(padded, numbers, machine=toy(2, 2), effort="quick"), 0)


def test_integers_are_exact() -> None:
    torch.manual_seed(0)
    a = torch.randint(-128, 128, (17, 64), dtype=torch.int8)
    b = torch.randint(-128, 128, (64, 40), dtype=torch.int8)
    program = map_onto(lambda x, y: torch._int_mm(x, y), a, b, machine=toy(2, 3))
    assert simulate(program, a, b).output.equal(torch._int_mm(a, b))


def test_bfloat16_is_what_the_interpreter_of_tiles_says() -> None:
    torch.manual_seed(0)
    model, x = MLP().bfloat16(), torch.randn(16, 64).bfloat16()
    program = map_onto(model, x, machine="toy")
    assert program.mapping is not None
    expected = interpreter.run(program.mapping.tiles, program.machine, [x])
    assert simulate(program, x).output.equal(expected[0])


def test_rows_chosen_by_data() -> None:
    torch.manual_seed(0)
    model, x = nn.Embedding(40, 16), torch.randint(0, 40, (3, 5))
    program = map_onto(model, x, machine="toy")
    for _ in range(2):  # another choice takes the same time
        agree(model, (x,), program, 0.0)
        x = torch.randint(0, 40, (3, 5))


def test_several_chips() -> None:
    torch.manual_seed(0)
    chips = (
        '\n[chips]\ncount = [2, "assumed: two"]\ntopology = ["ring", "assumed: a pair"]\n'
        'width = ["16 B", "assumed: half"]\n'
        'latency = [40, "assumed: far"]\njitter = [3, "assumed: two clocks"]\ngates = [[[0, 1]], "assumed: a corner"]\n'
    )
    model, x = MLP(32, 48), torch.randn(16, 32)
    program = map_onto(model, x, machine=toy(2, 2, chips), chips=2)
    agree(model, (x,), program, 1e-5)
    assert {page.core.chip for page in program.listing.pages} == {0, 1}
    assert simulate(program, x, jitter=7).output.equal(simulate(program, x).output)


def test_dead_cores_are_left_alone() -> None:
    torch.manual_seed(0)
    dead = '\n[dead]\ncores = [[[0, 1], [2, 2]], "assumed: two are dead"]\n'
    model, x = MLP(32, 48), torch.randn(16, 32)
    program = map_onto(model, x, machine=toy(3, 3, dead), effort="quick")
    agree(model, (x,), program, 1e-5)
    assert not {(0, 1), (2, 2)} & {page.core[1:] for page in program.listing.pages}


def test_a_core_without_copy_engines() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 5, 32)
    agree(model, (x,), map_onto(model, x, machine=toy(2, 2, engines=0), effort="quick"), 1e-5)


@pytest.mark.parametrize("stationary", ["weight", "input", "output"])
def test_arrays(stationary: str) -> None:
    torch.manual_seed(0)
    machine = toy(2, 2, stationary=f'"{stationary}"', loading='"overlapped"', rows=8, columns=4, banks=4, read_ports=2)
    model, x = MLP(20, 33), torch.randn(11, 20)
    agree(model, (x,), map_onto(model, x, machine=machine, effort="quick"), 1e-5)


def test_arrays_of_one_core_work_side_by_side() -> None:
    torch.manual_seed(0)
    model, x = MLP(64, 64), torch.randn(64, 64)
    figures = {"rows": 4, "columns": 4, "banks": 32, "read_ports": 8, "write_ports": 8, "size": '"256 KiB"'}
    took = {}
    for count in (1, 2, 4):
        program = map_onto(model, x, machine=toy(1, 1, count=count, **figures))
        agree(model, (x,), program, 1e-5)
        took[count] = program.cycles
    assert step(program.program, x)[1] == took[4] < 0.45 * took[1] and took[2] < 0.65 * took[1]


def test_the_same_seed_gives_the_same_listing() -> None:
    torch.manual_seed(0)
    model, x = MLP(32, 48), torch.randn(8, 32)
    texts = [str(map_onto(model, x, machine="toy", seed=3)) for _ in range(2)]
    assert texts[0] == texts[1]


def test_a_program_is_read_edited_and_saved(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = MLP(32, 48), torch.randn(8, 32)
    program = tessera.map_onto(model, x, machine="toy")
    assert parse(str(program)) == program.listing
    assert "matrix" in program.core(0, 0)
    assert list(program.stages)[-1] == "listing"
    assert "up" in program.why("up")
    # The line is the model's own, not that of PyTorch's Linear.
    assert f"up nets.py:{MLP.forward.__code__.co_firstlineno + 1}" in program.why("up")
    with pytest.raises(MapError, match="modules are"):
        program.why("sideways")
    slower = program.edited(str(program).replace(f"end {program.cycles}", f"end {program.cycles + 1}"))
    with pytest.raises(Exception, match="expected the program to end at"):
        simulate(slower, x)
    program.save(tmp_path / "mlp.spatial")
    assert simulate(tmp_path / "mlp.spatial", x).output.equal(simulate(program, x).output)


class Refused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).real


def test_what_is_refused() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(MapError, match=r"has no form.*test_map.py:\d+"):
        map_onto(Refused(), x, machine="toy")
    with pytest.raises(SpaceError, match="needs 1,050,624 bytes .* about 6 chips would do, more than the 1 of toy"):
        map_onto(nn.Linear(512, 512), torch.randn(1, 512), machine="toy")
    with pytest.raises(SpaceError, match="about 2 chips would do.*, or weights of 16 bits"):
        map_onto(nn.Linear(300, 300), torch.randn(1, 300), machine="toy")
    with pytest.raises(OptionError, match="expected 1, as many as toy has"):
        map_onto(MLP(), torch.randn(4, 64), machine="toy", chips=2)
    with pytest.raises(OptionError, match="expected one of quick"):
        map_onto(MLP(), torch.randn(4, 64), machine="toy", effort="some")
    with pytest.raises(OptionError, match="expected a spatial one"):
        map_onto(MLP(), torch.randn(4, 64), machine="h100")
    with pytest.raises(OptionError, match="got NoneType"):
        map_onto(MLP(), torch.randn(4, 64), machine=None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"seed: expected a whole number, got 'a'"):
        map_onto(MLP(), torch.randn(4, 64), machine="toy", seed="a")  # type: ignore[arg-type]
    with pytest.raises(MapError, match="gives c64.*expected real numbers"):
        map_onto(lambda x: (x * 1j).real, x, machine="toy")
    with pytest.raises(MapError, match="gives nothing"):
        map_onto(lambda x: None, x, machine="toy")


@pytest.mark.parametrize(
    ("chips", "cut", "message"),
    [
        (2.5, None, "chips: expected 1 to 256, as many as lpx has; got 2.5"),
        (True, None, "chips: expected 1 to 256"),
        (2, "tensor", "cut: expected words and counts"),
        (2, {"tensors": 2}, "cut: expected tensor, experts, pipeline"),
        (2, {"tensor": 2}, r"no weight of Linear can be cut in 2: .* sizes that it divides .*; got \[17, 17\]"),
    ],
)
def test_cuts_that_cannot_be(chips: int, cut: dict | None, message: str) -> None:
    with pytest.raises((OptionError, MapError), match=message):
        map_onto(nn.Linear(17, 17), torch.randn(1, 17), machine="lpx", chips=chips, cut=cut)


def test_convolutions_are_not_cut_in_tensors() -> None:
    with pytest.raises(MapError, match=r"expected matrices of products, .*; got \[4, 2, 3, 3\]"):
        map_onto(nn.Conv2d(2, 4, 3), torch.randn(1, 2, 5, 5), machine="lpx", chips=2, cut={"tensor": 2})


def test_what_all_memory_together_cannot_hold_is_refused_before_a_mapping_is_tried() -> None:
    with pytest.raises(SpaceError, match=r"needs 1,050,624 bytes .* 262,144; .* more than the 1 of toy"):
        map_onto(nn.Linear(512, 512), torch.randn(1, 512), machine="toy")


def test_nothing_among_results_is_left_out() -> None:
    x = torch.randn(4, 8)
    assert simulate(map_onto(lambda x: (x + 1, None), x, machine="toy", effort="quick"), x).output.equal(x + 1)


def test_an_exported_program_takes_the_sizes_of_its_arguments() -> None:
    model, x = nn.Linear(8, 4), torch.randn(5, 8)
    rows = torch.export.Dim("rows", min=2, max=16)
    fixed, open_ = (torch.export.export(model, (x,), dynamic_shapes=sizes) for sizes in (None, ({0: rows},)))
    for program, args in ((fixed, ()), (fixed, (x,)), (open_, (x,))):
        agree(model, (x,), map_onto(program, *args, machine="toy", effort="quick"), 1e-5)
    with pytest.raises(MapError, match="expected a tensor whose sizes are numbers"):
        map_onto(open_, machine="toy")
    for program in (fixed, open_):
        with pytest.raises(CaptureError, match=r"Guard failed: .*size\(\)\[0\]") as told:
            map_onto(program, torch.randn(17, 8), machine="toy")
        assert "\n" not in str(told.value)


def test_a_chip_of_very_many_cores_is_used_in_part() -> None:
    model, x = nn.Linear(32, 24).double(), torch.randn(4, 32, dtype=torch.float64)
    program = map_onto(model, x, machine="wse3", effort="quick")
    assert len(program.listing.pages) <= 300
    with torch.no_grad():
        torch.testing.assert_close(simulate(program, x).output, model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_topk_takes_each_place_once(dtype: torch.dtype) -> None:
    """Also where all that is left is as low as can be, or no number."""
    rows = torch.tensor([[3.0, 9, 1, 7, 5], [2, 4, 6, 8, 0], [1, 5, 3, 2, 4], [4, 3, 2, 1, 0]])
    if dtype.is_floating_point:
        rows[1, [0, 1, 2, 4]], rows[2, 3] = -torch.inf, torch.nan
    x = rows.to(dtype)
    program = map_onto(lambda x: x.topk(3), x, machine="toy", effort="quick")
    (values, places), expected = simulate(program, x).outputs, x.topk(3).values
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x.gather(1, places), expected, rtol=0, atol=0, equal_nan=True)
    assert all(len(set(row)) == 3 for row in places.tolist())


def test_products_of_eight_bits_with_scales() -> None:
    torch.manual_seed(0)
    eight, machine = torch.float8_e4m3fn, toy(2, 2, passes="{ float8_e4m3fn = 1, bfloat16 = 1")
    w, by, and_by = torch.randn(24, 32).to(eight), torch.tensor(0.5), torch.tensor(3.0)

    def model(x: torch.Tensor) -> torch.Tensor:
        return scaled_mm(x.to(eight), w.t(), by, and_by, out_dtype=torch.bfloat16)

    x = torch.randn(5, 32)
    exact = 1.5 * (x.to(eight).double() @ w.double().t())
    got = simulate(map_onto(model, x, machine=machine, effort="quick"), x).output
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(got, model(x), rtol=2**-7, atol=1e-6)


def test_cores_that_are_far_apart_are_left_alone() -> None:
    torch.manual_seed(0)
    model, x = Block(16, 2), torch.randn(1, 5, 16)
    near, far = (map_onto(model, x, machine=toy(*grid, latency=1_000_000)) for grid in ((1, 1), (2, 2)))
    assert far.cycles <= near.cycles


def test_orders_of_small_programs_are_searched() -> None:
    torch.manual_seed(0)
    model, x = Attention(16, 2, 1), torch.randn(1, 8, 16)
    machine = toy(2, 2, banks=2, read_ports=2, write_ports=2)
    found = [map_onto(model, x, machine=machine, effort="normal") for _ in range(2)]
    assert found[0].listing == found[1].listing and found[0].mapping is not None
    schedule = found[0].mapping.schedule
    assert searched(schedule, machine, schedule.cycles) is schedule
    assert searched(schedule, machine, 0).cycles <= schedule.cycles


class Turned(nn.Module):
    """Weights that lie otherwise than tiles read them: turned, every second column, a single column, in an order of
    their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.wide = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.randn(24, 64))
        self.cube = nn.Parameter(torch.randn(4, 3, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x @ self.up.t()
        scale = self.wide.t()[:24, 3:4].reshape(-1)
        return h, h @ self.wide[:, ::2] * self.wide[0, 1::2], h * scale, h @ self.cube.permute(1, 2, 0).reshape(24, 4)


def test_weights_that_lie_otherwise_are_read_right_and_not_copied() -> None:
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(8, 16)
    program = map_onto(model, x, machine="toy")
    agree(model, (x,), program, 1e-5)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    used = [t for t in program.data.values() if t.untyped_storage().data_ptr() in weights]
    assert (16, 24) in [tuple(t.shape) for t in used]
    agree(model, (x,), program.edited(str(program)), 1e-5)


def scaled(x: torch.Tensor, mask: torch.Tensor | None = None, by: float = 1.0, negated: bool = False) -> torch.Tensor:
    y = x * by if mask is None else x * by + mask
    return -y if negated else y


def test_arguments_that_are_no_tensors_are_part_of_the_program() -> None:
    x = torch.randn(3, 4)
    for args, kwargs in (((x, None), {}), ((x,), {"by": 0.5, "negated": True}), ((x, x[0], 3), {})):
        program = map_onto(scaled, *args, machine="toy", effort="quick", **kwargs)
        given = [a for a in args if isinstance(a, torch.Tensor)]
        torch.testing.assert_close(simulate(program, *given).output, scaled(*args, **kwargs))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_floats_beyond_a_narrow_type_leave_their_low_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([[300.5, -300.7, 127.9, -128.9, 200.0, -1.5, 70000.0, -70000.0]])
    program = map_onto(lambda x: (x.to(dtype), x.round().clamp(-100, 100).to(dtype)), x, machine="toy", effort="quick")
    wide = x.to(torch.int32).to(dtype), x.round().clamp(-100, 100).to(torch.int32).to(dtype)
    assert all(map(torch.equal, simulate(program, x).outputs, wide))
    if dtype != torch.uint8:  # of signed types it is known that they hold -100 to 100: one expression
        assert "int32[" not in str(map_onto(lambda x: x.clamp(-100, 100).to(dtype), x, machine="toy", effort="quick"))
