"""`generate` of transformers on a mesh: one process's tokens, with caches that are split over heads and written in
place. All ranks are run in one process; `test_interop.py` has two."""

from __future__ import annotations

import pytest
import torch
from steps import pretended
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import tessera
from tessera.distributed import in_step
from tessera.ir.equation import Value
from tessera.just_in_time import sharded
from tessera.util.errors import OptionError

pytest.importorskip("transformers")

from generating import GREEDY, PROMPT, language_model  # noqa: E402


class AllRanks:
    """Every rank's part of what rank 0 is called with, and of what it gets."""

    def __init__(self, whole: dict[str, Tensor]) -> None:
        self.whole = whole
        self.parts: dict[int, list[Tensor]] = {}  # by where the part lies that rank 0 has
        self.held: list[Tensor] = []  # those, so that no other gets their place

    def call(self, program: sharded._Program, *args: Tensor) -> list:
        (compiled,) = program.compilation.account.programs
        trace, forward = compiled.trace, program.forward
        names = [*forward.weights, *forward.buffers]
        parts = []
        for i, (v, x) in enumerate(zip(trace.inputs, args, strict=True)):
            if i < len(names):
                self.parts.setdefault(x.data_ptr(), in_step.cut(self.whole[names[i]], v.type.placement))
            parts.append(self.parts.get(x.data_ptr()) or [x.clone() for _ in range(v.type.placement.mesh.ranks)])
            self.keep(x, parts[-1])
        out = iter(in_step.run(trace, parts))
        for x, each in zip(args, parts, strict=True):
            x.copy_(each[0])  # counters that generate looks at
        results = [self.keep(each[0], each) for each in out]
        values = dict(zip(dict.fromkeys(v for v in forward.outputs if isinstance(v, Value)), results, strict=True))
        return [values[v] if isinstance(v, Value) else v for v in forward.outputs]

    def keep(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        self.parts[x.data_ptr()] = parts
        self.held.append(x)
        return x


@pytest.fixture
def all_ranks(monkeypatch: pytest.MonkeyPatch) -> AllRanks:
    ranks = AllRanks({})
    prepare = sharded.ShardedCall._prepare

    def prepared(self: sharded.ShardedCall, *args: object, **more: object) -> sharded._Program:
        program = prepare(self, *args, **more)
        program.compilation.executable.call = lambda *tensors: ranks.call(program, *tensors)
        return program

    monkeypatch.setattr(sharded.ShardedCall, "_prepare", prepared)
    return ranks


@pytest.mark.parametrize(
    ("name", "plan"),
    [("llama", "tensor"), ("qwen3", "tensor"), ("gpt2", "tensor"), ("mixtral", "tensor"), ("llama", "hf"),
     ("mixtral", "hf")],
)  # fmt: skip
def test_tokens_are_one_processes(name: str, plan: str, all_ranks: AllRanks) -> None:
    model = language_model(name)
    want = model.generate(PROMPT, **GREEDY)
    assert len(want.unique()) > len(PROMPT.unique())
    all_ranks.whole = {n: x.detach().clone() for n, x in (*model.named_parameters(), *model.named_buffers())}
    with pretended({"tp": 2}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan=plan, executors="aten")
        assert fast.generate(PROMPT, **GREEDY).tolist() == want.tolist()
        _, token = fast.__tessera__.compilations()  # the prompt's program and a token's
    trace = token.account.programs[0].trace
    written = {eqn.args[0].name: eqn.args[0] for eqn in trace.equations if eqn.opname == "index_copy_"}
    assert len(written) == 4  # keys and values of two layers, this rank's heads of them, where they lie
    heads = 4 if name == "gpt2" else 2
    for v in written.values():
        assert v in trace.inputs and str(v.type.placement).startswith(f"[2, {heads}/tp, "), v


def test_their_plan() -> None:
    """What a model says of itself is where its weights lie; what it does not name is whole."""
    with pretended({"tp": 2}) as mesh:
        model = tessera.shard(language_model("qwen3"), mesh, {"tp": "hf", "*.layers.0.mlp.up_proj.weight": "f, d"})
        lie = {name: p.placements[0] for name, p in model.named_parameters() if isinstance(p, DTensor)}
        block = "model.layers.0."
        assert lie[block + "self_attn.q_proj.weight"] == lie["model.embed_tokens.weight"] == Shard(0)
        assert lie[block + "self_attn.o_proj.weight"] == lie[block + "mlp.down_proj.weight"] == Shard(1)
        assert lie[block + "self_attn.q_norm.weight"] == lie[block + "mlp.up_proj.weight"] == Replicate()
        with pytest.raises(OptionError, match="GPT2LMHeadModel has none; 'tensor' reads one off the program"):
            tessera.shard(language_model("gpt2"), mesh, "hf")
        strange = torch.nn.Sequential(torch.nn.Linear(4, 4))
        strange.tp_plan = {"0": "diagonal"}
        with pytest.raises(OptionError, match="says 'diagonal' of 0; expected one of colwise"):
            tessera.shard(strange, mesh, "hf")
