"""Models of equal blocks as chains: PyTorch's answers, in the cycles that were scheduled; each part is mapped once; and
what does not fit together is refused."""

from __future__ import annotations

import copy
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

import tessera.spatial.map
from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine, read
from tessera.machines.spatial.read import vary
from tessera.spatial.capture import captured
from tessera.spatial.chain.api import ChainProgram, shared_out
from tessera.spatial.chain.blocks import equal_blocks
from tessera.spatial.errors import MapError, SpaceError
from tessera.spatial.listing.chain import parse_chain, print_chain
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import cost, simulate
from tessera.spatial.simulator.chain import judge_chain
from tessera.spatial.simulator.violation import Violation
from tessera.tools.bench.spatial_models import Eight
from tessera.tools.cli import main
from tessera.torch_internals.operators import scaled_mm
from tessera.util.errors import InputError, ListingError, OptionError
from tests.spatial.nets import MLP, Llama
from tests.spatial.test_chips import rack

WORD = torch.tensor([3])


def in_blocks(
    model: nn.Module, *args: torch.Tensor, machine: SpatialMachine, blocks: int, tensor: int = 1, pipeline: int = 1
) -> ChainProgram:
    cut = {"tensor": tensor, "pipeline": pipeline, "blocks": blocks}
    program = map_onto(model, *args, machine=machine, chips=tensor * pipeline, cut=cut)
    assert isinstance(program, ChainProgram)
    return program


def mapped(model: nn.Module, tensor: int, pipeline: int, topology: str = "mesh", blocks: int = 4) -> ChainProgram:
    machine = rack(topology, size='"256 KiB"', banks=2)
    at = torch.tensor([0])
    return in_blocks(model, WORD, at, machine=machine, blocks=blocks, tensor=tensor, pipeline=pipeline)


@pytest.mark.parametrize(
    "tensor, pipeline, topology", [(1, 1, "mesh"), (1, 3, "ring"), (2, 2, "torus"), (2, 4, "mesh")]
)
def test_a_llama_decodes(tensor: int, pipeline: int, topology: str) -> None:
    torch.manual_seed(0)
    model = Llama(layers=4)
    program = mapped(model, tensor, pipeline, topology)
    assert cost(program).cycles == program.cycles >= program.bound >= program.limit
    assert len({chip for run in program.chain.runs for _, chip in run.chips}) == tensor * pipeline
    reference, word, state, expected = copy.deepcopy(model), WORD, None, WORD
    for place in range(2):
        run = simulate(program, word, torch.tensor([place]), state=dict(state or {}))
        (word,), state, expected = run.outputs, run.state, reference(expected, torch.tensor([place]))
        assert word.equal(expected) and run.cycles == program.cycles


def test_a_part_is_mapped_once() -> None:
    """Blocks of all stages run the same parts; the weights of each lie at addresses of their own."""
    few, many = (mapped(Llama(layers=n), 1, 4, "torus", n).chain for n in (4, 8))
    assert len(many.runs) == len(few.runs) + 4 and len(many.parts) == len(few.parts) + 1
    stages = [run for run in many.runs if run.name.startswith("block")]
    assert len({run.part for run in stages}) == 2 and len(stages) == 8


def test_chains_print_and_parse() -> None:
    chain = mapped(Llama(layers=2), 1, 2, blocks=2).chain
    assert print_chain(parse_chain(print_chain(chain))) == print_chain(chain)


def test_chains_are_saved(tmp_path: Path) -> None:
    """A file is enough to run a chain, with what it kept; whatever is wrong with it is one clear error."""
    model, path = Llama(layers=3), tmp_path / "llama.spatial"
    program = mapped(model, 1, 3, blocks=3)
    program.save(path)
    kept: dict[str, torch.Tensor] = {}
    for place in range(3):
        one, other = (simulate(p, WORD, torch.tensor([place]), state=kept) for p in (program, path))
        assert one.output.equal(other.output) and one.report == other.report and one.cycles == program.cycles
        assert all(other.state[name].equal(value) for name, value in one.state.items())
        kept = dict(other.state)
    with pytest.raises(InputError, match="expected 2 inputs .word, at., got 1"):
        simulate(path, WORD)
    with pytest.raises(InputError, match="expected word to be int64.1., got int64.2."):
        simulate(path, torch.tensor([1, 2]), torch.tensor([0]))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert "data/block1.safetensors" in members

    def rewritten(said: str, name: str, content: bytes | None) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for member, old in members.items():
                if (new := content if member == name else old) is not None:
                    archive.writestr(member, new)
        with pytest.raises((ListingError, Violation), match=said):
            simulate(path, WORD, torch.tensor([0]))

    text = members["chain.txt"].decode()
    body = text[text.index("part before") :]
    rewritten("block1.safetensors is missing", "data/block1.safetensors", None)
    rewritten("header of safetensors", "data/block1.safetensors", b"nothing")
    rewritten("machine.toml is missing", "machine.toml", None)
    rewritten("before is there twice", "chain.txt", (text + body).encode())
    rewritten("names of their own; block1 is there 2 times", "chain.txt", text.replace(" block2 ", " block1 ").encode())
    rewritten("expected inputs of the chain in", "chain.txt", text.replace("inputs word at", "inputs word as").encode())
    rewritten("cut off", "chain.txt", text[: len(text) // 2].encode())
    for new in ("", "inputs 5", "run  @x  a  b  chips 0>0"):
        rewritten("expected", "chain.txt", text.replace("inputs word at", new, 1).encode())
    rewritten("expected a chain with parts", "chain.txt", text[: text.index("\npart ")].encode())


def test_more_chips_are_stages_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chips are too many to share every tensor, a model of equal blocks is a chain, without a word."""
    monkeypatch.setattr(tessera.spatial.map, "TOGETHER", 4)
    torch.manual_seed(0)
    model, machine, at = Llama(layers=6), rack("torus", size='"256 KiB"', banks=2), torch.tensor([0])
    program = map_onto(model, WORD, at, machine=machine, chips=6)
    assert isinstance(program, ChainProgram)
    assert sum(run.name.startswith("block") for run in program.chain.runs) == 6
    assert program.part("before").cycles == program.chain.runs[1].start
    assert simulate(program, WORD, at).output.equal(model(WORD, at))
    alone = MLP(16, 32)
    assert not isinstance(map_onto(alone, torch.randn(3, 16), machine=machine, chips=8, effort="quick"), ChainProgram)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.model(words, use_cache=False).logits


SMALL = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
        GPT2Config(**SMALL, n_positions=32, bos_token_id=0, eos_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_models_of_transformers(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model, x = Logits(AutoModelForCausalLM.from_config(config).eval()), torch.arange(8)[None]
    machine = rack("torus", size='"256 KiB"', banks=2)
    with torch.no_grad():
        assert equal_blocks(captured(model, (x,), {})) == 4
        run = simulate(in_blocks(model, x, machine=machine, blocks=4, tensor=2, pipeline=2), x)
        torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "chips, blocks, tensor, pipeline", [(256, 80, 16, 16), (32, 8, 4, 8), (4, 4, 1, 4), (8, 3, 8, 1), (1, 5, 1, 1)]
)
def test_stages_are_even(chips: int, blocks: int, tensor: int, pipeline: int) -> None:
    cut = shared_out(spatial_machine("lpx"), chips, blocks)
    assert (cut.tensor, cut.pipeline) == (tensor, pipeline)


def test_blocks_are_counted() -> None:
    x = torch.randn(3, 16)
    for model, count in (
        (nn.Sequential(*(MLP(16, 32) for _ in range(5))), 5),
        (nn.Sequential(nn.Linear(16, 16), *(MLP(16, 32) for _ in range(4)), nn.LayerNorm(16)), 4),
        (MLP(16, 32), 0),
    ):
        assert equal_blocks(captured(model, (x,), {})) == count
    assert equal_blocks(captured(Llama(layers=7), (WORD, torch.tensor([0])), {})) == 7


def test_from_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, path = tmp_path / "script.py", str(tmp_path / "a.spatial")
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n"
        "    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]\n"
        "    return nn.Sequential(*layers), (torch.randn(2, 16),)\n"
    )
    source = f"{script}:model"
    assert main(["map", source, "--cut", "blocks=3", "--output", path]) == 0
    assert "in 5 runs of" in capsys.readouterr().out
    assert main(["simulate", path, "--random"]) == 0
    assert "chip 0" in capsys.readouterr().out
    for wrong in (["--cut", "blocks"], ["--cut", "blocks=3", "--metrics", path]):
        assert main(["map", source, *wrong]) != 0
        assert "expected" in capsys.readouterr().err


def test_what_does_not_fit_together_is_refused() -> None:
    program = mapped(Llama(layers=4), 2, 2, "torus")
    chain, machine = program.chain, program.machine
    second = next(i for i, run in enumerate(chain.runs) if run.name == "block1")

    def refused(kind: str, **changes: object) -> None:
        runs = list(chain.runs)
        runs[second] = replace(runs[second], **changes)
        with pytest.raises(Violation) as violation:
            judge_chain(replace(chain, runs=tuple(runs)), machine)
        assert violation.value.kind == kind

    refused("unit", start=chain.runs[second].start - 1)  # begins before the last one has ended
    refused("overlap", part=chain.runs[second - 1].part)  # its weights would be where those of the last one lie
    chips = [chip for _, chip in chain.runs[second].chips]
    refused("route", chips=tuple((chip, other) for chip, other in zip(chips, (0, 6), strict=True)))  # no neighbours
    refused("core", chips=tuple((chip, chips[0]) for chip in chips))
    with pytest.raises(Violation, match="end"):
        judge_chain(replace(chain, end=chain.end + 1), machine)


class Scaled(nn.Module):
    """Layers with a number of their own each, as it is and as part of another."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(16, 32) for _ in numbers)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(n)) for n in numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x / (scale + 1)) * scale
        return x


class Eights(nn.Module):
    """Layers of eight bits, each with a scale of its own for its inputs and one for its weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Eight(32, 32) for _ in range(count))
        for i, layer in enumerate(self.layers):
            layer.by, layer.weight_by = (nn.Buffer(torch.tensor(n)) for n in (0.5 + i, 2 / (1 + i)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            eight = (x / layer.by).to(layer.weight.dtype)
            x = x + scaled_mm(eight, layer.weight.t(), layer.by, layer.weight_by, out_dtype=torch.float32)
        return x


@pytest.mark.parametrize("numbers", [(2.0, 2.0, 2.0), (1.0, 2.0, 3.0)])
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 3)])
def test_numbers_of_each_block(numbers: tuple[float, ...], tensor: int, pipeline: int) -> None:
    """What blocks differ in lies in memory; what is the same in all may be a part of the program."""
    model, x = Scaled(*numbers), torch.randn(3, 16)
    program = in_blocks(model, x, machine=rack(), blocks=3, tensor=tensor, pipeline=pipeline)
    assert ("scales" in str(program)) == (len(set(numbers)) > 1)
    run = simulate(program, x)
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


def test_scales_of_each_tensor() -> None:
    torch.manual_seed(0)
    model, x = Eights(3), torch.randn(16, 32)
    with pytest.raises(MapError, match="array multiplies .*, not torch.float8_e4m3fn: called at"):
        in_blocks(model, x, machine=rack(), blocks=3, tensor=2)
    machine = read("toy2x2", rack().text.replace("int8 = 1", "int8 = 1, float8_e4m3fn = 1"))
    run = simulate(in_blocks(model, x, machine=machine, blocks=3, tensor=2), x)
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


class Ordered(nn.Module):
    """Layers whose columns stand in an order of their own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(16, 32) for _ in range(count))
        self.orders = nn.ParameterList(nn.Parameter(torch.randperm(16), False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, order in zip(self.layers, self.orders, strict=True):
            x = layer(x[:, order])
        return x


def test_an_order_that_differs_from_block_to_block_lies_in_memory() -> None:
    torch.manual_seed(0)
    model, x = Ordered(3), torch.randn(3, 16)
    run = simulate(in_blocks(model, x, machine=rack(), blocks=3), x)
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


def test_blocks_that_are_not_equal_are_refused() -> None:
    x, machine = torch.randn(3, 16), rack()
    model = nn.Sequential(*(MLP(16, 32) for _ in range(3)))
    for cut, said in (({"blocks": 3, "batches": 3}, "got both"), ({"blocks": 3, "pipeline": 4}, "1 to 3 stages")):
        with pytest.raises(OptionError, match=said):
            map_onto(model, x, machine=machine, chips=4, cut=cut)
    with pytest.raises(MapError, match="no 5 equal blocks"):
        in_blocks(nn.Sequential(*(MLP(16, 32) for _ in range(4))), x, machine=machine, blocks=5)


def test_what_does_not_fit_into_memory_is_refused() -> None:
    """Weights alone fit, just; all memory together is asked for before any block is mapped."""
    model = nn.Sequential(*(MLP(64, 256) for _ in range(8)))
    with pytest.raises(SpaceError, match="more stages"):
        in_blocks(model, torch.randn(2, 64), machine=rack(size='"259 KiB"'), blocks=8)
    with pytest.raises(SpaceError, match="needs 1,058,816 bytes for weights and state, and 4 cores have 524,288"):
        in_blocks(model, torch.randn(2, 64), machine=rack(size='"128 KiB"'), blocks=8)


def test_blocks_that_do_not_fit_are_refused_with_the_chips_and_the_type_that_would_do() -> None:
    small = vary(spatial_machine("lpx"), {"sram.size": "4 KiB", "sram.align": "32 B"})
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2))).eval()
    told = "weights are 526,336 bytes in all, a chip has 262,144; about 3 chips would do, or weights of 16 bits"
    with pytest.raises(SpaceError, match=told):
        map_onto(model, torch.randn(2, 256), machine=small, chips=2, cut={"blocks": 2})
