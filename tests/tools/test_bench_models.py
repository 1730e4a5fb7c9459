"""The model suite: every job at tiny sizes on the CPU, what is wrong is told, and the report is complete."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tessera.tools import cli
from tessera.tools.bench import model_contestants, model_first, model_run
from tessera.tools.bench.model_contestants import EAGER, MODES, OURS, enter, mistake, names, reference
from tessera.tools.bench.model_floor import Products, bytes_read, products_floor
from tessera.tools.bench.model_jobs import BF16, jobs
from tessera.tools.bench.model_report import Row, listed, table
from tessera.tools.networks import Bert, EncoderConfig, MoE, ResNet50, ViT

TINY = {str(job): job for job in jobs(tiny=True)}
LLAMA = "llama-prefill 2x16"


def options(**more: object) -> model_run.Options:
    return model_run.Options(who=(EAGER, OURS), device="cpu", tiny=True, rounds=1, **more)  # type: ignore[arg-type]


# --- the whole suite ---


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "models.json"
    given = ["--tiny", "--device", "cpu", "--who", EAGER, OURS, "--rounds", "2", "--json", str(path), "--check"]
    assert cli.main(["bench", "models", *given]) == 0
    return json.loads(path.read_text())


def test_every_job_runs_for_eager_and_for_us(found: dict) -> None:
    assert found["suite"] == "models"
    assert [f"{row['job']} {row['size']}" for row in found["rows"]] == list(TINY)
    for row in found["rows"]:
        peer = BF16 if row["job"] in ("llama-decode-int4", "llama-prefill-fp8") else EAGER
        assert row["errors"] == {}
        assert row["seconds"].keys() == row["first"].keys() == row["of_floor"].keys() == {peer, OURS}
        assert row["floor"] > 0 and row["wall"] > 0 and len(row["samples"][OURS]) == 2
        assert row["to"][peer] == row["ratios"][peer] > 0


def test_full_sizes_are_those_of_the_table() -> None:
    full = jobs(tiny=False)
    assert [job.name for job in full] == [
        "llama-train", "llama-step", "llama-prefill", "llama-prefill-fp8", *["llama-decode"] * 6, "llama-decode-int4",
        "gpt2-train", "vit-train", "bert-infer", "resnet50-step", "moe",
    ]  # fmt: skip
    assert [str(job) for job in full if job.quick] == [
        "llama-train 2x4096", "llama-prefill 2x4096", "llama-prefill-fp8 2x4096", "llama-decode batch 1, context 1",
        "llama-decode batch 1, context 8192", "llama-decode batch 8, context 8192",
        "llama-decode-int4 batch 1, context 1024", "gpt2-train 8x1024",
    ]  # fmt: skip
    assert {job.dtype for job in full} == {torch.bfloat16}
    chosen = model_run.Options(quick=True, only=("gpt2-train", "llama-step")).jobs()
    assert [str(job) for job in chosen] == ["gpt2-train 8x1024"]


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        (lambda: ViT(EncoderConfig()), 86.6),
        (lambda: ResNet50(), 25.6),
        (lambda: Bert(EncoderConfig(24, 1024, 16, 4096)), 334.1),
        (lambda: MoE(), 1409.3),
    ],
    ids=["vit-b-16", "resnet50", "bert-large", "mixtral"],
)
def test_networks_have_the_usual_number_of_parameters(model, millions: float) -> None:  # noqa: ANN001
    with torch.device("meta"):
        count = sum(p.numel() for p in model().parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.1)


def test_tokens_go_to_their_two_best_experts() -> None:
    """With room for all, the queues give what computing every expert for every token gives."""
    torch.manual_seed(0)
    model, x = MoE(8, 16, 4, slack=4.0), torch.randn(2, 5, 8)
    share, expert = model.router(x).softmax(-1).topk(2, dim=-1)
    share = share / share.sum(-1, keepdim=True)
    hidden = torch.nn.functional.silu(torch.einsum("btd,edh->bteh", x, model.gate))
    hidden = hidden * torch.einsum("btd,edh->bteh", x, model.up)
    every = torch.einsum("bteh,ehd->bted", hidden, model.down)
    wanted = (every.gather(2, expert[..., None].expand(-1, -1, -1, 8)) * share[..., None]).sum(2)
    torch.testing.assert_close(model(x, wanted), torch.zeros(()), atol=1e-10, rtol=0)
    crowded = copy.deepcopy(model)
    crowded.slack = 0.5
    assert crowded(x, wanted) > 1e-4  # some tokens found no room


# --- right and wrong ---


@pytest.mark.parametrize("name", ["llama-train 2x16", "llama-step 2x16", LLAMA, "llama-decode batch 2, context 8"])
def test_what_is_wrong_is_reported_and_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = TINY[name]

    def lying(who: str, *given: object) -> model_contestants.Run:
        run = honest(who, *given)  # type: ignore[arg-type]
        if who != OURS:
            return run
        return model_contestants.Run(run.call, lambda out: {n: x * 1.01 for n, x in run.results(out).items()})

    honest = model_contestants.build
    monkeypatch.setattr(model_contestants, "build", lying)
    monkeypatch.setattr(model_contestants, "compiler", lambda who, replayed=False: lambda f: f)
    monkeypatch.setattr(model_contestants, "_our_step", lambda *given: model_contestants._their_step(EAGER, *given))
    row = Row(job.name, job.size, job.kind, "float32", "cpu")
    model_run.measure(row, job, options(), 1e10, lambda text: None)
    assert row.errors[OURS].startswith("WrongResult: ") and "is off by" in row.errors[OURS]
    assert row.seconds.keys() == {EAGER} and row.ratios == {}


def test_a_result_may_be_off_as_far_as_eagers() -> None:
    exact = {"loss": torch.ones(4), "w": torch.ones(4)}
    eager = {"loss": torch.ones(4), "w": torch.full((4,), 1.1)}
    near = {"loss": torch.ones(4), "w": torch.full((4,), 0.8)}
    assert mistake(eager, eager, exact, torch.bfloat16) == mistake(near, eager, exact, torch.bfloat16) == ""
    assert mistake(near | {"loss": torch.full((4,), 1.02)}, eager, exact, torch.bfloat16).startswith("loss is off")
    assert mistake(near | {"w": torch.full((4,), float("nan"))}, eager, exact, torch.bfloat16).startswith("w is off")
    assert mistake({"loss": torch.ones(4)}, eager, exact, torch.bfloat16) == "no gradient of w"


def test_a_contestant_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(who: str, replayed: bool = False) -> object:
        if who == OURS:
            raise RuntimeError("no such kernel\nmore")
        return lambda f: f

    monkeypatch.setattr(model_contestants, "compiler", broken)
    (row,) = model_run.run(options(only=("llama-prefill",)), lambda text: None)
    assert row.errors == {OURS: "RuntimeError: no such kernel"} and row.seconds.keys() == {EAGER}


def test_after_the_deadline_nothing_is_started() -> None:
    rows = model_run.run(options(deadline=0.0), lambda text: None)
    assert len(rows) == len(TINY) and all(row.errors == {"not run": "0 seconds were over"} for row in rows)


# --- who, floors, first calls ---


def test_who_enters() -> None:
    who = (EAGER, "inductor", *MODES, OURS)
    assert names(who, TINY[LLAMA]) == list(who)
    assert names(who, TINY["llama-decode batch 1, context 1"]) == [w for w in who if w != "inductor[overhead]"]
    int4 = next(job for job in TINY.values() if job.rivals)
    assert names(who, int4) == [BF16, OURS] and names((EAGER,), int4) == []


def test_the_floor_counts_products_forward_and_backward() -> None:
    job = TINY["llama-train 2x16"]
    run = enter(EAGER, job, job.make("cpu"))
    with Products("cpu") as seen:
        run.call()
    layers = 7 + 1  # of one block, and the head
    assert seen.calls == 3 * layers + 2 and seen.seconds > 0  # two more for attention
    assert len(seen._known) < seen.calls
    assert products_floor(lambda: torch.ones(3) + 1, "cpu") == 0


def test_the_floor_of_a_token_is_what_it_reads() -> None:
    job = TINY["llama-decode batch 2, context 8"]
    made = job.make("cpu")
    weights = sum(p.numel() for p in made.model.parameters()) - 61 * 128
    assert bytes_read(made.model, made.inputs) == 4 * (weights + 2 * 2 * 2 * 8 * 32)


def test_the_reference_has_more_bits() -> None:
    job = TINY[LLAMA]
    made = job.make("cpu")
    exact, usual = reference(job, made).call(), enter(EAGER, job, made).call()
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), usual, rtol=1e-4, atol=1e-5)


def test_the_reference_has_no_shared_keys() -> None:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with model_contestants.OwnKeys():
        got = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(got, wanted)


def test_first_calls_cold_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict] = []

    def child(module: str, task: str, environment: dict, **given: object) -> float:
        assert (module, task) == (model_first.__name__, "first_call") and not Path(
            environment["TESSERA_CACHE"]
        ).exists()
        seen.append(environment)
        if given["who"] == "thunder":
            raise RuntimeError("no")
        return float(len(seen))

    monkeypatch.setattr(model_first, "in_process", child)
    job, row = TINY[LLAMA], Row("llama-prefill", "2x16", "infer", "float32", "cpu")
    model_first.first_calls(row, job, [EAGER, OURS, "thunder"], True, "cpu", lambda text: None)
    assert (row.cold, row.warm) == ({OURS: 1.0}, {OURS: 2.0}) and seen[0] == seen[1] != seen[2]
    assert row.errors == {"thunder, cold": "RuntimeError: no"}
    assert model_first.first_call(str(job), OURS, True, "cpu") > 0


# --- the report ---


def test_report_takes_the_best_way_of_a_peer() -> None:
    row = Row("llama-train", "2x4096", "train", "bfloat16", "cuda", floor=0.04)
    row.seconds = {EAGER: 0.08, "inductor": 0.06, "inductor[autotune]": 0.05, OURS: 0.05}
    row.ratios = {EAGER: 0.625, "inductor": 0.83, "inductor[autotune]": 1.0}
    row.peak = {EAGER: 2**30, "inductor": 2**30, "inductor[autotune]": 3 * 2**29, OURS: 2**29}
    row.first = dict.fromkeys(row.seconds, 2.0)
    row.cold, row.warm = {OURS: 3.0, "inductor[autotune]": 30.0}, {OURS: 1.0}
    assert row.best("inductor") == "inductor[autotune]" and row.best("thunder") is None
    assert (row.ratio("inductor"), row.ratio("thunder"), row.fraction()) == (1.0, None, pytest.approx(0.8))
    late = Row("moe", "2x4", "train", "bfloat16", "cuda", errors={"not run": "9 seconds were [over]"})
    fewer = Row("int4", "1", "decode", "bfloat16", "cuda", floor=1.0, rivals={BF16: 3.0}, ratios={BF16: 0.5})
    fewer.seconds = fewer.first = {BF16: 4.0, OURS: 2.0}
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(table([row, late, fewer]))
    shown = console.export_text()
    assert all(
        text in shown for text in ("80%", "1.50", "30 s", "not run: 9 seconds were [over]", "0.50 of bf16's 4 s")
    )
    assert "75% of its own floor" in shown and "cold tessera" in shown
    one, _, other = listed([row, late, fewer])
    assert one["to"] == {EAGER: 0.625, "inductor": 1.0} and other["to"] == {BF16: 0.5}
    assert one["best"] == {EAGER: EAGER, "inductor": "inductor[autotune]"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--device", "cpu"], "--tiny"),
        (["--tiny", "--who", "aot_eager"], "for models, got 'aot_eager'"),
        (["--only", "softmax"], "choose from llama-train"),
    ],
)
def test_command_line_refuses(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "models", *given]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["llama-train", "llama-step", "llama-prefill", "llama-prefill-fp8", "llama-decode", "llama-decode-int4"]
)
def test_on_a_gpu(name: str) -> None:
    """The graph that is captured by hand, peaks and events, at tiny sizes."""
    given = model_run.Options((name,), device="cuda", tiny=True, rounds=2)
    for row in model_run.run(given, lambda text: None):
        assert row.errors == {} and row.seconds.keys() == row.peak.keys() and min(row.peak.values()) > 0
