"""Limits of large models on an LPX are what a hand computes from the machine's published figures: bytes of weights and
caches over the ports of all memories, multiplications over all arrays. Weights take no memory here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessera.machines.find import spatial_machine
from tessera.spatial.bounds import limit
from tessera.spatial.capture import captured
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import cost
from tessera.tools.bench.spatial_models import Eight, Experts, LlamaBlock, without_memory
from tests.spatial.measured import MOST, RATES, simulated
from tests.spatial.nets import MLP
from tests.spatial.test_chips import rack

LPX = spatial_machine("lpx")
# Width, heads, groups of them, inner width.
MODELS = {"8B": (4096, 32, 8, 14336), "70B": (8192, 64, 8, 28672)}
CONTEXT, PROMPT = 8192, 512


def least(model: nn.Module, *args: torch.Tensor, chips: int) -> int:
    cores = tuple(core for chip in range(chips) for core in LPX.cores(chip))
    return limit(captured(model.eval(), args, {}).graph, LPX, cores).cycles


def weights(wide: int, heads: int, groups: int, inner: int) -> int:
    return 2 * wide * wide + 2 * wide * groups * (wide // heads) + 3 * wide * inner


def reads(chips: int) -> int:
    """Bytes a cycle, through all ports."""
    return chips * 64 * 2 * 781


@pytest.mark.parametrize("name", MODELS)
def test_decoding_reads_weights_and_cache(name: str) -> None:
    wide, heads, groups, inner = MODELS[name]
    model = without_memory(lambda: LlamaBlock(1, wide, heads, groups, inner, CONTEXT))
    found = least(model, torch.zeros(1, wide).bfloat16(), torch.tensor([9]), chips=8)
    cache = 2 * CONTEXT * groups * (wide // heads) * 2
    assert found == pytest.approx((weights(*MODELS[name]) + cache) / reads(8), rel=0.03)


class Prompt(nn.Module):
    """A block that reads all words of a prompt at once."""

    def __init__(self, wide: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, wide // heads
        self.q, self.o = Eight(wide, wide), Eight(wide, wide)
        self.k, self.v = Eight(wide, groups * self.each), Eight(wide, groups * self.each)
        self.gate, self.up, self.down = Eight(wide, inner), Eight(wide, inner), Eight(inner, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(len(x), -1, self.each).transpose(0, 1)[None] for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a[0].transpose(0, 1).reshape(x.shape))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_multiplications(name: str) -> None:
    wide, heads, *_ = MODELS[name]
    model = without_memory(lambda: Prompt(*MODELS[name]))
    found = least(model, torch.zeros(PROMPT, wide).bfloat16(), chips=8)
    scores = 2 * heads * PROMPT * PROMPT * (wide // heads) * 2  # in bfloat16, which takes two passes
    assert found == pytest.approx((PROMPT * weights(*MODELS[name]) + scores) / (8 * 64 * 4 * 1600), rel=0.03)


def test_experts_of_a_671b() -> None:
    """Sixteen of its 256, as many as a sixteenth of the chips hold; a few rows choose nearly all."""
    model = without_memory(lambda: Experts(7168, 2048, 16, 8))
    found = least(model, torch.zeros(4, 7168).bfloat16(), chips=16)
    assert found == pytest.approx(16 * 3 * 7168 * 2048 / reads(16), rel=0.03)


class Latent(nn.Module):
    """Attention of a 671B that decodes: keys and values are one narrow row a place, which all heads share."""

    WIDE, HEADS, QUERIES, ROW, EACH, TURNED = 7168, 128, 1536, 512, 128, 64

    def __init__(self) -> None:
        super().__init__()
        heads, each = self.HEADS, self.EACH
        self.q_down, self.q_up = Eight(self.WIDE, self.QUERIES), Eight(self.QUERIES, heads * (each + self.TURNED))
        self.kv, self.o = Eight(self.WIDE, self.ROW + self.TURNED), Eight(heads * each, self.WIDE)
        self.up_k, self.up_v = (nn.Parameter(torch.randn(heads, *s).bfloat16()) for s in ((128, 512), (512, 128)))
        self.register_buffer("rows", torch.zeros(CONTEXT, self.ROW + self.TURNED).bfloat16())

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.rows[at] = self.kv(x)
        q = self.q_up(self.q_down(x)).view(self.HEADS, 1, -1)
        q = torch.cat([q[..., : self.EACH] @ self.up_k, q[..., self.EACH :]], -1)
        shares = torch.softmax((q[:, 0] @ self.rows.t()).float(), -1).bfloat16()
        return self.o(((shares @ self.rows[:, : self.ROW])[:, None] @ self.up_v).reshape(1, -1))


def test_latent_attention_of_a_671b() -> None:
    """All heads multiply with each row that is read: so many multiplications take longer than reading."""
    model, of = without_memory(Latent), Latent
    found = least(model, torch.zeros(1, of.WIDE).bfloat16(), torch.tensor([9]), chips=16)
    row, inner = of.ROW + of.TURNED, of.HEADS * of.EACH
    eight = of.WIDE * (of.QUERIES + row + inner) + of.QUERIES * of.HEADS * (of.EACH + of.TURNED)
    wide = 2 * inner * of.ROW + of.HEADS * CONTEXT * (row + of.ROW)  # in bfloat16, which takes two passes
    assert found == pytest.approx((eight + 2 * wide) / (16 * 64 * 4 * 1600), rel=0.03)
    assert found > (eight + 2 * (2 * inner * of.ROW + CONTEXT * row)) / reads(16)


def test_a_prompt_through_experts_of_a_671b() -> None:
    """Every word goes through all sixteen that lie there."""
    model = without_memory(lambda: Experts(7168, 2048, 16, 8))
    found = least(model, torch.zeros(PROMPT, 7168).bfloat16(), chips=16)
    assert found == pytest.approx(PROMPT * 16 * 3 * 7168 * 2048 / (16 * 64 * 4 * 1600), rel=0.03)


@pytest.mark.parametrize("chips", [4, 8])
def test_a_sum_over_chips_sends_what_a_hand_counts(chips: int) -> None:
    """Inputs come to each chip by its own port. Every chip sends each other one its part of the sum, and all but the
    first send what they added to the first, which has the residual and gives the result."""
    torch.manual_seed(0)
    rows, wide = 32, 64
    machine = rack("all", size='"1 MiB"')
    program = map_onto(MLP(wide, 128), torch.randn(rows, wide), machine=machine, chips=chips, effort="quick")
    whole = rows * wide * 4
    assert cost(program).bytes["chip link"] == pytest.approx((chips - 1) * whole * (1 + 1 / chips), rel=0.03)


@pytest.mark.parametrize("name", RATES)
def test_rates_of_published_machines(name: str) -> None:
    """Not below what was measured on them, nor far above."""
    assert 1 <= simulated(RATES[name]) / RATES[name].rate <= MOST
