"""An engine from an artifact: the same answers, and nothing is compiled."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import model
from served import folder

import tessera
from tessera.artifact.container import Container, Writer
from tessera.artifact.trust import own_tag
from tessera.serve.engine import Engine
from tessera.serve.packed import Packed, check_trust
from tessera.serve.programs import KEPT
from tessera.tools.cli import main
from tessera.util.errors import ArtifactError, InputError, OptionError

PROMPTS = ["the cat sat", "größer", "Once upon a time the cat sat on the mat", "t"]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("packed") / "tiny")


@pytest.fixture(scope="module")
def plain(where: Path) -> Engine:
    return Engine(where, memory="4MB", compiled=False)


@pytest.fixture(scope="module")
def file(plain: Engine) -> Path:
    before = plain.generate(PROMPTS[0], max_tokens=6, temperature=0)
    path = Path(plain.model.twin.config._name_or_path).parent / "tiny.tess"  # type: ignore[attr-defined]
    plain.export(path)
    assert plain.generate(PROMPTS[0], max_tokens=6, temperature=0) == before  # its own pools are back
    return path


def test_the_same_answers_and_no_compiling(plain: Engine, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr("tessera.pipeline.compilation.Compilation.__init__", never)
    wanted = plain.generate(PROMPTS, max_tokens=12, temperature=0)
    tight = 60 * 4 * 2 * 2 * 32 * 4  # bytes for 60 blocks: not all prompts run at once
    for settings in ({"memory": tight, "block_size": 4, "budget": 9, "speculate": 2}, {"memory": "4MB"}):
        engine = Engine(file, check=True, **settings)  # type: ignore[arg-type]
        answers = engine.generate(PROMPTS, max_tokens=12, temperature=0)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
        assert [answer.text for answer in answers] == [answer.text for answer in wanted]
        assert "regions by kernels of the file" in engine.explain() and engine.longest == plain.longest
        assert tuple(engine.programs) == KEPT  # those for few sequences are for other devices


def test_deterministic_files_keep_their_promise(where: Path, tmp_path: Path) -> None:
    given = Engine(where, memory="4MB", compiled=False, deterministic=True)
    given.export(path := tmp_path / "same.tess")
    engine = Engine(path, memory="4MB", block_size=4, deterministic=True)
    settings = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "logprobs": 0}
    wanted = given.generate(PROMPTS, **settings)
    together = engine.generate(PROMPTS, **settings)
    alone = [engine.generate([prompt], **settings)[0] for prompt in PROMPTS]
    assert [a.logprobs for a in together] == [a.logprobs for a in alone]
    assert [a.tokens for a in together] == [a.tokens for a in wanted] and [*engine.programs] == ["mixed"]
    with pytest.raises(ArtifactError, match="steps were all of one size; export it again"):
        Packed(changed(path, tmp_path / "old.tess", "version", 1))


def test_neither_the_compiler_nor_transformers_is_imported(file: Path) -> None:
    names = ("tessera.pipeline", "tessera.just_in_time", "xdsl", "llvmlite", "transformers", "rich")
    code = f"""import sys
from tessera.serve.engine import Engine
Engine({str(file)!r}, memory="4MB").generate("the cat", max_tokens=2)
print([name for name in {names} if name in sys.modules])"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_tokenizer_comes_along(plain: Engine, file: Path) -> None:
    tokenizer = Packed(file).tokenizer
    assert tokenizer is not None and plain.tokenizer is not None
    assert tokenizer.chat_template == plain.tokenizer.chat_template  # type: ignore[attr-defined]
    assert tokenizer.encode("größer ☃") == plain.tokenizer.encode("größer ☃")


def test_the_command_line_takes_a_file(plain: Engine, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (wanted,) = plain.generate(PROMPTS[0], max_tokens=5, temperature=0)
    asked = ["generate", str(file), PROMPTS[0], "--max-tokens", "5", "--temperature", "0", "--memory", "4MB", "--json"]
    assert main([*asked, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == wanted.text


def test_kernels_that_nobody_vouches_for_are_left_out(
    plain: Engine, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TESSERA_KEYS", str(tmp_path))
    with pytest.warns(UserWarning, match="kernels are left out"):
        engine = Engine(file, memory="4MB")
    with Container.open(file) as container, pytest.raises(ArtifactError, match="to serve it on a GPU, trust a key"):
        check_trust(container, torch.device("cuda"))
    assert "no kernels of the file run here" in capsys.readouterr().err
    answers, wanted = (e.generate(PROMPTS[:1], max_tokens=5, temperature=0) for e in (engine, plain))
    assert answers[0].tokens == wanted[0].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "quantize: .*when you export"),
        ({"deterministic": True}, "deterministic: .*without it"),
        ({"cache_dtype": "fp8"}, "cache_dtype: .*float32"),
        ({"compiled": False}, "compiled"),
    ],
)
def test_what_the_file_has_decided_is_said(file: Path, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Engine(file, memory="4MB", **options)


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.tess"
    tessera.export(torch.nn.Linear(2, 2).eval(), (torch.ones(3, 2),), other)
    with pytest.raises(ArtifactError, match="expected what engine.export wrote, got an artifact of main"):
        Engine(other)
    with pytest.raises(ArtifactError, match="cut off|begins with"):
        (tmp_path / "text.tess").write_text("no artifact" * 1000)
        Engine(tmp_path / "text.tess")
    with pytest.raises(InputError, match="has programs, and no modules"):
        Engine(file, memory="4MB").export(tmp_path / "again.tess")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2), ("vocabulary", 0), ("vocabulary", True), ("longest", -1), ("stops", [2**40]), ("layers", []),
        ("layers", [[1, 2, 3]]), ("tokenizer", {"template": 1, "named": {}}), ("tokenizer", {"named": {"a b": "x"}}),
        ("tokenizer", {"template": None, "named": {"bos_token": 1}}), ("tokenizer", []),
        ("stored", "float64"), ("stored", "load"), ("deterministic", 1),
    ],
)  # fmt: skip
def test_facts_are_checked(file: Path, tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ArtifactError, match="serve: expected facts of a language model"):
        Packed(changed(file, tmp_path / "changed.tess", name, value))


def changed(file: Path, path: Path, name: str, value: object) -> Path:
    """The facts of a file, one of them changed."""
    with Container.open(file) as container, Writer(path) as writer:
        manifest = {key: x for key, x in container.manifest.items() if key != "members"}
        manifest["serve"] = {**manifest["serve"], name: value}
        writer.finish(manifest, own_tag)
    return path


def test_a_model_with_experts(tmp_path: Path) -> None:
    """In 16 bits, where its experts are a grouped product of PyTorch's."""
    prompts = [[5, 6, 7], [3] * 9]
    engine = Engine(copy.deepcopy(model("mixtral")).bfloat16(), memory="4MB", compiled=False)
    engine.export(path := tmp_path / "experts.tess")
    found, wanted = (e.generate(prompts, max_tokens=8, temperature=0) for e in (Engine(path, memory="4MB"), engine))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    text = next(n for n in Container.open(path).members if n.startswith("texts/decode/cpu"))
    with Container.open(path) as container:
        program = container.read(text).decode()
    assert "grouped_mm" in program and "_assert_tensor_metadata" not in program
