"""The benchmark of formats: its files are valid, and what it says of figures that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.tools.bench import format_llama, formats
from tessera.tools.bench.format_names import EXPORTED, JAX, ONNX, ORT, TORCH, TORCH_ONNX, ZOO
from tessera.tools.llama import LlamaConfig

SECONDS = {"eager": [4.0, 4.0], ONNX: [3.0, 3.0], ORT: [2.0, 2.0]}
ANSWERS = {
    "write": None, "first": 1.0, "steady": SECONDS, "export": ([4.0, 2.0], 100), "kernels": {JAX: 11, TORCH: 10},
}  # fmt: skip


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every door is measured at once, and every package is there."""

    def door(task: str, **options: object) -> object:
        if task == "write":
            Path(options["path"]).touch()  # type: ignore[arg-type]
        return ANSWERS[task]

    monkeypatch.setattr(formats, "_door", door)
    monkeypatch.setattr(formats, "_installed", lambda *packages: True)


def measured(section: str, folder: Path) -> dict[tuple[str, str, str], formats.Row]:
    listed = formats.run([section], folder, formats.Options(1), lambda text: None)
    return {(row.section, row.who, row.unit): row for row in listed}


def test_every_network_is_held_to_eager_and_all_of_them_to_onnxruntime(tmp_path: Path) -> None:
    rows = measured("networks", tmp_path)
    for name in (*ZOO, *EXPORTED):
        assert rows[f"networks: {name}", ONNX, "ms"].passed
        assert rows[f"networks: {name}", ONNX, f"x {ORT}"].value == 1.5
    mean = rows["networks: geometric mean", ONNX, f"x {ORT}"]
    assert mean.value == pytest.approx(1.5) and mean.passed is False
    assert not list(tmp_path.iterdir())  # the files are large


def test_other_doors(tmp_path: Path) -> None:
    rows = measured("import", tmp_path)
    assert all(rows[f"import: {name}", ONNX, "ms"].passed for name in EXPORTED)
    assert measured("jax", tmp_path)["jax", JAX, "kernels"].passed
    rows = measured("export", tmp_path)
    assert rows["export, first", ONNX, "ms"].ratio == 1.0 and not rows["export, again", ONNX, "ms"].passed
    assert rows["export, nodes", TORCH_ONNX, "nodes"].value == 100


def test_an_artifact_of_a_language_model_is_timed_from_the_start_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = LlamaConfig(layers=1, width=64, heads=4, kv_heads=2, hidden=64, vocab=50)
    monkeypatch.setattr(format_llama, "TINY", llama)
    monkeypatch.setattr(format_llama, "PROMPT", (1, 8))
    monkeypatch.setattr(formats, "_probe", lambda task, **options: task(**options))
    options = formats.Options(2, tiny=True)
    rows = {row.who: row for row in formats.run(["llama"], tmp_path, options, lambda text: None)}
    first = rows["first result"]
    assert first.passed is not None and first.at_most == 2000.0 and len(first.samples) == 2
    for parts in zip(first.samples, *(rows[part].samples for part in ("device", "load", "first call")), strict=True):
        assert parts[0] == pytest.approx(sum(parts[1:]))
    assert not formats.run(["llama"], tmp_path, formats.Options(1), lambda text: None)  # no GPU


def test_a_network_of_the_zoo_has_weights() -> None:
    onnx = pytest.importorskip("onnx")
    from tessera.tools.bench import format_networks

    network = format_networks._zoo("squeezenet")
    onnx.checker.check_model(network)
    assert [i.name for i in network.graph.input] == ["data_0"]
    assert not [node for node in network.graph.node if node.op_type == "ConstantOfShape"]
