"""Jobs of `tessera bench serve --table` that ask from outside, as users do: other processes are started.

    http      a server, Poisson arrivals, 8 requests a second of 512 tokens in and 128 out, by the client of OpenAI
    artifact  from the command `tessera generate` to the first token, of one file that holds programs and weights
    folder    the same of a folder, with empty caches

Folders hold random weights, and a tokenizer that spells every token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.serve.engine import Engine
from tessera.tools.bench.model_first import CACHES
from tessera.tools.bench.serve_load import Result, arrivals, drive, percentile, served_model
from tessera.tools.bench.serve_place import LLAMA, Measured, Place, Say, config_of, free, here, least, network
from tessera.util.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMMAND = (sys.executable, "-m", "tessera.tools.cli")
RATE, ASKED = 8.0, (512, 128)


@contextlib.contextmanager
def started(folder: str, options: Sequence[str], say: Say) -> Iterator[str]:
    """The address of a server over a folder, for as long as it is measured."""
    say("starting a server")
    command = [*COMMAND, "serve", folder, "--port", "0", "--no-access-log", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if match := re.search(r"ready on (http\S+)/v1", line):
                yield match[1]
                return
        raise InputError(f"{folder}: the server did not start: {''.join(said)[-500:]}")
    finally:
        process.terminate()
        process.communicate()


def spelt(folder: Path, vocabulary: int) -> None:
    """A tokenizer for so many tokens, each of which is a short text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġ{number:x}" for number in range(vocabulary - len(letters))]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def bare(folder: Path, place: Place) -> None:
    """A folder of a config and a tokenizer."""
    config = config_of(LLAMA, place.tiny)
    config.eos_token_id = config.bos_token_id = None
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    spelt(folder, config.vocab_size)


def http(place: Place) -> Iterator[Measured]:
    count, (given, out) = place.count(256), map(place.count, ASKED)
    options = [
        *place.flags,
        "--random-weights",
        "--longest",
        "2048",
        *(["--memory", place.small] if place.tiny else []),
    ]
    with tempfile.TemporaryDirectory() as folder:
        bare(Path(folder), place)
        with started(folder, options, place.say) as url:
            name, client = served_model(url, ""), "openai" if find_spec("openai") else "httpx"
            for number, seed in ((place.count(96), 9), (count, 0)):  # the first ones warm up
                place.say(f"http: {number} requests")
                requests = arrivals(number, RATE, (given, out), vocabulary=10_000, seed=seed)
                results, _ = asyncio.run(drive(url, name, "", requests, client))
    yield from _latencies(results, (given, out), client, place)


def _latencies(results: Sequence[Result], lengths: tuple[int, int], client: str, place: Place) -> Iterator[Measured]:
    failed = [r for r in results if r.status != 200 or r.tokens != lengths[1]]
    if failed:
        raise InputError(f"{len(failed)} of {len(results)} requests failed: {failed[0].error or failed[0].tokens}")
    note = f"{len(results)} requests by {client}"
    model = network(LLAMA, Place("meta", place.tiny))  # its sizes alone
    first, each = (1e3 * least(model, [each], place) for each in ((lengths[0], 1), (0, 1)))
    gaps = [gap for r in results for gap in r.between]
    for what, values, limit, bounds in (
        ("first token", [r.first for r in results], first, (60.0, 200.0)), ("between tokens", gaps, each, (8.0, 30.0)),
    ):  # fmt: skip
        for share, bound in zip((50, 99), bounds, strict=True):
            yield Measured(
                "http", f"{what}, p{share}", 1e3 * percentile(values, share), "ms", bound, False, limit, note
            )


def artifact(place: Place) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as kept:
        file = Path(kept) / "llama.tess"
        bare(Path(kept), place)
        place.say("artifact: writing it")
        model = _endless(place)
        # Nothing is compiled for this process: the file's programs are.
        engine = Engine(
            model, tokenizer=_tokenizer(kept), memory=place.small, longest=2048, device=place.device, compiled=False
        )
        engine.export(file)
        limit = _copied(model, place)
        del engine, model
        free()
        for what in ("first token", "first token, started again"):  # Triton has kept its kernels by then
            yield _first("artifact", file, what, 10.0, limit, place)


def folder(place: Place) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as kept:
        written = Path(kept) / "llama"
        bare(written, place)
        place.say("folder: writing it")
        model = _endless(place)
        model.save_pretrained(written)
        limit = _copied(model, place)
        del model
        free()
        empty = {variable: str(Path(kept) / variable.lower()) for variable in CACHES}
        yield _first("folder", written, "first token, empty caches", 60.0, limit, place, empty)


def _endless(place: Place) -> PreTrainedModel:
    model = network(LLAMA, place)
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    return model


def _copied(model: PreTrainedModel, place: Place) -> float:
    """Seconds in which the weights could be copied to the device."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) / here(place)["link.pcie"]


def _first(
    job: str,
    model: Path,
    what: str,
    bound: float,
    limit: float,
    place: Place,
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """From the command to the first token. Files were just written, so weights are in the page cache."""
    place.say(f"{job}: the first token")
    took, whole, account = first_text(str(model), place, environment or {})
    return Measured(job, what, took, "s", bound, False, limit, f"{whole:.1f} s to the end of the process; {account}")


def _tokenizer(folder: str):  # noqa: ANN202
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def first_text(model: str, place: Place, environment: Mapping[str, str]) -> tuple[float, float, str]:
    """Seconds from the command to the first text of its answer, and to its end; and its own account of the first."""
    command = [*COMMAND, "generate", model, "Once upon a time", "--max-tokens", "2", "--ignore-eos"]
    command += ["--memory", place.small, *place.flags]
    told = {**os.environ, "TESSERA_LOG": "1", **environment}
    begun = time.perf_counter()
    process = subprocess.Popen(command, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    process.stdout.read(1)
    first = time.perf_counter() - begun
    _, said = process.communicate()
    if process.returncode:
        raise InputError(f"{json.dumps(command[3:])}: {said.decode(errors='replace')[-500:]}")
    account = re.search(rb"the first token came after (.*)", said)
    return first, time.perf_counter() - begun, account[1].decode() if account else ""
