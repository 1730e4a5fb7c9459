"""Deterministic steps: products and attention whose rows do not depend on who else is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, model
from interpreted import run_interpreted
from torch import Tensor, nn

import tessera
from tessera.serve.engine import Engine
from tessera.serve.inputs import padded
from tessera.serve.invariant import invariant, invariant_linear
from tessera.tools.llama import Llama, LlamaConfig

CASES = 18 + 18


class Products(nn.Module):
    """Products as models write them, and one that is none with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(24, 24), nn.Parameter(torch.randn(24, 24))
        self.bias = nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        with invariant():
            x = F.linear(self.layer(x), weight=self.own)
            x = torch.addmm(self.bias, x, self.own) + torch.matmul(x, self.own) + x @ self.own.t()
            x = x.matmul(self.own) + x.mm(self.own.t()) + torch.addmm(self.bias, x, self.own, beta=2)
            return x + x[None] @ x[None].transpose(1, 2) @ x[None]


@pytest.mark.parametrize("compiled", [False, True])
def test_every_product_with_a_matrix_is_replaced(compiled: bool) -> None:
    layer, x = Products().eval(), torch.randn(16, 24)
    run = tessera.jit(layer, fullgraph=True) if compiled else layer
    with torch.no_grad():
        found = run(x)
        with torch._C.DisableTorchFunction():
            wanted = layer(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    if compiled:
        program = str(tessera.stages(run)[-1].trace)
        assert program.count("tessera.invariant_linear") == 7 and program.count("aten.matmul") == 2
        assert not re.search(r"aten\.(addmm|mm|linear)", program)


def test_a_row_has_the_same_bits_among_any_others() -> None:
    x, weight, bias = torch.randn(70, 40), torch.randn(50, 40), torch.randn(50)
    whole = invariant_linear(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias))
    for count in (1, 2, 15, 16, 17, 33):
        assert torch.equal(invariant_linear(x[-count:], weight, bias), whole[-count:])
    assert invariant_linear(x[None, None, :3], weight, None).shape == (1, 1, 3, 50)


@pytest.mark.parametrize("name", [*FAMILIES[:1], *(pytest.param(n, marks=pytest.mark.sweep) for n in FAMILIES[1:])])
def test_no_other_product_is_left_in_a_program(name: str) -> None:
    """But for those of depth one, which add nothing up, and those of experts."""
    if name == "mixtral":
        pytest.skip("an expert's rows depend on who else is there, as the guide says")
    engine = Engine(model(name), memory=2**20, block_size=4, budget=8, deterministic=True)
    trace = engine.programs["mixed"].stages[-1].trace
    left = [str(eqn) for eqn in trace.equations if re.search(r"mm\b|linear|matmul|einsum", str(eqn.op))]
    assert left and all("invariant_linear" in line for line in left)


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_layers_in_fewer_bits_are_replaced_too(quantize: str) -> None:
    engine = Engine(model("llama"), memory=2**20, block_size=4, deterministic=True, quantize=quantize, budget=64)
    program = str(engine.programs["mixed"].stages[-1].trace)
    assert "invariant_linear" in program and "quantized_linear" not in program
    prompts = [[5, 6, 7], [3] * 9, [9, 8]]
    together = engine.generate(prompts, max_tokens=6, temperature=0, logprobs=0)
    alone = [engine.generate([prompt], max_tokens=6, temperature=0, logprobs=0)[0] for prompt in prompts]
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]


def test_a_model_of_ones_own_is_deterministic() -> None:
    own = Llama(LlamaConfig(vocab=64, width=64, hidden=128, layers=2, heads=4, kv_heads=2)).eval()
    engine = Engine(own, memory=2**20, block_size=4, compiled=False, deterministic=True)
    prompts = [[5, 6, 7], [3] * 9, [9, 8]]
    together = engine.generate(prompts, max_tokens=6, temperature=0, logprobs=0)
    assert together[1].logprobs == engine.generate(prompts[1:2], max_tokens=6, temperature=0, logprobs=0)[0].logprobs


def test_steps_are_as_large_as_what_they_compute() -> None:
    engine = Engine(model("llama"), memory=2**22, compiled=False, deterministic=True)
    sizes: list[int] = []
    run = engine._programs.run
    engine._programs.run = lambda name, given, *rest: sizes.append(given.sizes.tokens) or run(name, given, *rest)  # type: ignore[method-assign]
    engine.generate([list(range(2, 35)), [3, 4]], max_tokens=5)
    assert sizes == [padded(35), *[padded(2)] * 4]


def test_kernels_give_the_same_bits_however_they_are_launched() -> None:
    pytest.importorskip("triton")
    assert int(run_interpreted(Path(__file__).with_name("invariant_cases.py")).split()[-1]) == CASES


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    from invariant_cases import attention_stands_alone, products_stand_alone

    wide = [] if dtype is torch.float32 else [(32, 8, 128)]  # which take minutes to compile in float32
    for heads, groups, head in ((4, 2, 64), *wide):
        assert attention_stands_alone("cuda", dtype, heads, groups, head) == 18
    for k, n in ((1024, 3072), (130, 140)):
        assert products_stand_alone("cuda", dtype, k, n) == 18


WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+(k\d+)")
# Beside a product of the matrix unit, these would round a sum otherwise.
FUSED = re.compile(r"fma\.rn\.f32|mma\.sync")
TILED = [(False, False), (True, False), (True, True)]  # of several tokens, of a single one, and the latter across


@pytest.mark.parametrize("stored", ["*bf16", "*fp8e4nv"])
@pytest.mark.parametrize("window", [False, True])
def test_attention_compiles_for_hopper(stored: str, window: bool) -> None:
    """Whatever a tile looks like, and whether parts are kept or not, instructions of one depth compute it."""
    flags = {
        "GROUP": 4, "SHARE": 4, "SIZE": 16, "TILE": 64, "HEAD": 128, "D": 128, "VALUE": 128, "DV": 128,
        "WINDOW": window, "SOFTCAP": window, "KEYS": 512,
    }  # fmt: skip
    given = {"q": "*bf16", "out": "*bf16", "keys": stored, "values": stored, "sums": "*fp32", "tops": "*fp32"}
    given |= dict.fromkeys(("tables", "starts", "positions"), "*i64") | {"scale": "fp32", "softcap": "fp32"}
    for single, across in TILED:
        own = {**flags, "ROWS": 8 if across else 64, "SINGLE": single, "ACROSS": across}
        for keeps in (False, True):
            text = compiled("attend", given, {**own, "KEEPS": keeps})
            assert set(WGMMA.findall(text)) == {"k16"} and not FUSED.search(text)
        assert not FUSED.search(compiled("combine", given, {**own, "QUERIES": 1 if single else 16}))


@pytest.mark.parametrize("dtype", ["*bf16", "*fp16"])
def test_products_compile_for_hopper(dtype: str) -> None:
    """Tiles of all sizes multiply by instructions of one depth: so rows do not depend on which of them is taken."""
    given = dict.fromkeys(("x", "weight", "bias", "y"), dtype) | {"sums": "*fp32"}
    flags = {"PARTS": 3, "BIAS": True, "NEIGHBOURS": 16}
    for rows, columns, depth in invariant_kernels().TILES:
        tile = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth // 2}
        for keeps in (False, True):
            text = compiled("product", given, {**flags, **tile, "KEEPS": keeps}, rows // 16)
            assert set(WGMMA.findall(text)) == {"k16"} and "mma.sync" not in text
    compiled("add_parts", given, {**flags, "COLUMNS": 1024})


def invariant_kernels() -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("tessera.serve.invariant_kernels")


def compiled(name: str, given: dict[str, str], flags: dict[str, object], warps: int = 4) -> str:
    """The assembly of a kernel for a GPU that is not there."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(invariant_kernels(), name)
    constants = {key: value for key, value in flags.items() if key in kernel.arg_names}
    types = {key: "constexpr" if key in constants else given.get(key, "i32") for key in kernel.arg_names}
    # as a launch sees them: pointers and strides that are multiples of 16
    divisible = {"row_x", "row_w", "token_q", "head_q", "page_k", "slot_k", "head_k", "page_v", "slot_v", "head_v"}
    places = [
        i for i, key in enumerate(kernel.arg_names) if types[key].startswith("*") or key in {*divisible, "k", "n"}
    ]
    source = ASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in places})
    options = {"num_warps": warps, "num_stages": 3, **invariant_kernels().EXACT}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"].startswith(b"\x7fELF")
    return made.asm["ptx"]
