"""An engine's programs in an artifact: written by `engine.export`, read by `Engine("lm.tess")`.

In: a model with its sites. Out: a file whose entries `mixed` and `decode` take the pools as arguments of any number of
blocks, so that whoever loads it chooses how much memory the cache gets; beside them what the engine asks of a model
(`facts`), and the tokenizer's files. Read again it is a `Packed`, which follows the protocol `Paged` but brings its
programs along: nothing is captured or compiled.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from tessera.artifact import trust
from tessera.artifact.container import MOST_MEMBER, Container
from tessera.artifact.loaded import PORTABLE, load
from tessera.serve.huggingface import tokenizer_of
from tessera.serve.inputs import BOUNDS, LEAST, Inputs, first_call
from tessera.serve.invariant import invariant
from tessera.serve.programs import KEPT, Layer, Programs, Site, kept_as
from tessera.serve.tokenizer import Fast, Tokenizer, fast
from tessera.util.errors import ArtifactError, InputError, OptionError
from tessera.util.log import log
from tessera.util.phases import phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FACTS = "serve"  # what the manifest calls them
FILES, JSON = "serve/tokenizer/", "tokenizer.json"
TOKENIZER = re.compile(FILES + r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})")
STORED = ("float32", "float16", "bfloat16", "float8_e4m3fn")
MOST = 1 << 31  # of every number


class Given(Site):
    """A site whose pools come with the step, behind tables and slots."""

    def __init__(self, site: Site, index: int):
        nn.Module.__init__(self)
        self.group, self.groups, self.window, self.single = site.group, site.groups, site.window, site.single
        self.index = index

    def pools(self, step: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        at = 2 + 2 * self.groups + 2 * self.index
        return step[at], step[at + 1]


class Whole(nn.Module):
    """A step as a module that holds weights and nothing else."""

    def __init__(self, model: nn.Module, deterministic: bool):
        super().__init__()
        self.model, self.deterministic = model, deterministic

    def forward(
        self, tokens: Tensor, positions: Tensor, starts: Tensor, rows: Tensor | None, places: tuple[Tensor, ...],
        pools: tuple[Tensor, ...],
    ) -> Tensor:  # fmt: skip
        with invariant(self.deterministic):
            return self.model.paged_forward(tokens, positions, rows, (starts, positions, *places, *pools))  # type: ignore[operator]


# --- writing ---


class Saves(Protocol):
    """What is asked of a tokenizer that goes into a file."""

    def save_pretrained(self, folder: str) -> object: ...


def pack(programs: Programs, path: str | Path, tokenizer: object, targets: str | Sequence[str]) -> None:
    """Write a model's programs. Its sites are others meanwhile, so no step may run."""
    model, sites = programs.model, programs.sites
    if not isinstance(model, nn.Module):
        raise InputError(f"{path}: a model from an artifact has programs, and no modules that could be exported again")
    given = [Given(site, i) for i, site in enumerate(sites)]
    whole = Whole(model, programs.deterministic)
    model.take_sites(given)
    try:
        names = ("mixed",) if programs.deterministic else (*KEPT, *_few(programs, targets))
        entries = {name: (whole, *_example(programs, name)) for name in names}
        write = importlib.import_module("tessera.artifact.write").write  # the compiler, which reading does without
        files, about = _tokenizer_files(tokenizer)
        facts = _facts(programs) | {"tokenizer": about}
        write(entries, path, targets, facts={FACTS: facts}, members=files, few=BOUNDS)
    finally:
        model.take_sites(sites)


def _few(programs: Programs, targets: str | Sequence[str]) -> Sequence[str]:
    """Programs for few sequences, where some target has kernels for them."""
    limits = importlib.import_module("tessera.ops.rows.limits")
    kinds = {target.partition(":")[0] for target in ([targets] if isinstance(targets, str) else targets)}
    if kept_as(programs.model)[1] not in limits.DTYPES:
        return ()
    return tuple(BOUNDS) if any(limits.runs(torch.device(kind)) for kind in kinds) else ()


def _example(programs: Programs, name: str) -> tuple[tuple, dict, dict]:
    """Arguments of an entry, none by name, and which of their sizes change."""
    groups, device = programs.groups, programs.device
    sizes, flat, _ = first_call(name, groups)
    parts = Inputs.of(flat.to(device), sizes, groups)
    tokens, positions, starts, rows = (part.clone() for part in parts[:4])
    places = tuple(part.clone() for part in parts.places)
    pools = tuple(
        torch.zeros(11 + 2 * site.group, 3, *pool.shape[2:], dtype=pool.dtype, device=device)
        for site in programs.sites
        for pool in (site.keys, site.values)
    )
    flat_size: dict[int, object] = {0: "tokens"} if name not in BOUNDS else {0: ("tokens", LEAST, BOUNDS[name])}
    begins: dict[int, object] = {0: "starts"}
    if name == "one":
        flat_size, begins = {}, {}
    tables = [{1: "columns", **(flat_size if name != "mixed" else {0: "sequences"})}] * groups
    changing = {
        "tokens": flat_size, "positions": flat_size, "starts": begins,
        "rows": {0: "rows"} if name == "mixed" else None, "places": (*tables, *[flat_size] * groups),
        "pools": tuple({0: f"blocks{site.group}", 1: "block_size"} for site in programs.sites for _ in range(2)),
    }  # fmt: skip
    return (tokens, positions, starts, rows if name == "mixed" else None, places, pools), {}, changing


def _facts(programs: Programs) -> dict[str, object]:
    model = programs.model
    stored = str(programs.sites[0].keys.dtype).removeprefix("torch.")
    layers = [[x.heads, x.head, x.value_head, x.window] for x in model.layers()]
    return {
        "version": 1 + programs.deterministic, "vocabulary": model.vocabulary, "longest": model.longest,
        "stops": list(model.stops), "layers": layers, "stored": stored, "deterministic": programs.deterministic,
    }  # fmt: skip


def _tokenizer_files(tokenizer: object) -> tuple[dict[str, bytes], dict | None]:
    """Its files; and what else of it is needed, where transformers is not needed to read it."""
    if isinstance(tokenizer, Fast):
        data = tokenizer.backend_tokenizer.to_str()
        return {f"{FILES}{JSON}": data.encode()}, _about(tokenizer)
    if not hasattr(tokenizer, "save_pretrained"):
        return {}, None
    with tempfile.TemporaryDirectory() as folder:
        cast("Saves", tokenizer).save_pretrained(folder)
        files = {f"{FILES}{file.name}": file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
    if wrong := [name for name, data in files.items() if not TOKENIZER.fullmatch(name) or len(data) > MOST_MEMBER]:
        raise InputError(f"{wrong[0]}: an artifact holds no such file of a tokenizer")
    data = files.get(f"{FILES}{JSON}")
    found = None if data is None else fast(cast("PreTrainedTokenizerBase", tokenizer), data.decode())
    return files, None if found is None else _about(found)


def _about(tokenizer: Fast) -> dict:
    return {"template": tokenizer.chat_template, "named": tokenizer.special_tokens_map}


# --- reading ---


class Packed:
    """A model of an artifact. It holds no modules: `programs` are the file's, over the pools of the sites it took."""

    def __init__(self, path: str | Path, device: str | torch.device | None = None):
        with phase("programs"), Container.open(path) as container:
            facts = _read(container)
            self.loaded = load(path, device=device, compile=False)
            self.device = self.loaded.device
            check_trust(container, self.device)
            with phase("tokenizer"):
                self.tokenizer = _read_tokenizer(container, facts.get("tokenizer"))
        self.vocabulary, self.longest, self.stops = facts["vocabulary"], facts["longest"], tuple(facts["stops"])
        self.stored, self.deterministic = getattr(torch, facts["stored"]), facts["deterministic"]
        self._layers = [Layer(*row) for row in facts["layers"]]
        wanted = KEPT[:1] if self.deterministic else KEPT
        if missing := [name for name in wanted if name not in self.loaded.entries]:
            raise ArtifactError(f"{path}: expected the entry {missing[0]!r}, which is not in it")
        if any(entry.way.target == PORTABLE for entry in self.loaded.entries.values()):
            log(0, f"serve: {path}: no kernels of the file run here, PyTorch's operators do:\n{self.loaded.explain()}")
        kernels = {name for name, entry in self.loaded.entries.items() if entry.way.target != PORTABLE}
        self.few = tuple(name for name in BOUNDS if name in kernels)  # programs for few sequences
        self._sites: Sequence[Site] = ()

    def layers(self) -> list[Layer]:
        return self._layers

    def take_sites(self, sites: Sequence[Site]) -> None:
        self._sites = sites

    def program(self, name: str) -> Callable[..., Tensor]:
        entry = self.loaded.entries[name]

        def call(
            tokens: Tensor, positions: Tensor, starts: Tensor, rows: Tensor | None, places: tuple[Tensor, ...]
        ) -> Tensor:
            pools = tuple(pool for site in self._sites for pool in (site.keys, site.values))
            return cast("Tensor", entry.direct(tokens, positions, starts, rows, places, pools))

        return call

    def agree(self, deterministic: bool, stored: torch.dtype | None, quantize: str | None, compiled: bool) -> None:
        """Refuse options that the file has decided otherwise."""
        path = self.loaded.path
        if quantize is not None:
            raise OptionError(f"quantize: {path} holds its weights as they are; give it when you export")
        if not compiled:
            raise OptionError(
                f"compiled: {path} holds compiled programs alone; load the folder to run the model as it is"
            )
        if deterministic != self.deterministic:
            told = "with" if self.deterministic else "without"
            raise OptionError(f"deterministic: {path} was exported {told} it")
        if stored not in (None, self.stored):
            raise OptionError(f"cache_dtype: {path} was exported for pools of {self.stored}")


def _read(container: Container) -> dict:
    """The facts of a file, each of them checked."""

    def number(x: object, least: int = 0) -> bool:
        return type(x) is int and least <= x < MOST

    facts = container.manifest.get(FACTS)
    if facts is None:
        entries = ", ".join(map(str, container.manifest.get("entries", ())))[:80]
        raise ArtifactError(f"{container.path}: expected what engine.export wrote, got an artifact of {entries}")
    match facts:
        case {
            "version": version, "vocabulary": vocabulary, "longest": longest, "stops": list(stops),
            "layers": list(layers), "stored": stored, "deterministic": bool(deterministic),
        } if (
            number(version, 1) and version <= 1 + deterministic and
            number(vocabulary, 1) and (longest is None or number(longest, 1)) and all(map(number, stops))
            and stored in STORED and 0 < len(layers) < 10_000
            and all(isinstance(row, list) and len(row) == 4 and all(map(number, row)) for row in layers)
            and _is_about(facts.get("tokenizer"))
        ):  # fmt: skip
            if deterministic and version == 1:
                told = "deterministic programs whose steps were all of one size; export it again"
                raise container.wrong(FACTS, told)
            return facts
    raise container.wrong(FACTS, f"expected facts of a language model, version 1, got {str(facts)[:120]}")


def _is_about(tokenizer: object) -> bool:
    """What `_about` gives, or nothing."""
    match tokenizer:
        case None:
            return True
        case {"template": str() | None, "named": dict(named)}:
            return all(isinstance(token, str) and name.isidentifier() for name, token in named.items())
    return False


def check_trust(container: Container, device: torch.device) -> None:
    """On a GPU the operators over pages do not check their tables: a program that anybody wrote could read anything."""
    if device.type == "cuda" and not (verdict := trust.verdict(container)).trusted:
        raise ArtifactError(f"{container.path}: {verdict.why}; to serve it on a GPU, trust a key that signed it")


def _read_tokenizer(container: Container, about: dict | None) -> Tokenizer | None:
    if about is not None:
        data = container.read(f"{FILES}{JSON}")
        try:
            return Fast(data.decode(), about["template"], about["named"])
        except ImportError:
            raise
        except Exception as error:  # the package tokenizers has no kinds of its own
            told = " ".join(str(error).split())[:80]
            raise container.wrong(f"{FILES}{JSON}", f"expected a tokenizer: {told}") from None
    with tempfile.TemporaryDirectory() as folder:
        for name in container.members:
            if match := TOKENIZER.fullmatch(name):
                (Path(folder) / match[1]).write_bytes(container.read(name))
        return tokenizer_of(folder)
