"""`tessera serve MODEL`: a model behind OpenAI's endpoints. This process is the server, which does without PyTorch:
what is wrong with the engine's options, the engine's process says."""

from __future__ import annotations

import asyncio
import importlib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import tessera
from tessera.tools.command import Command, above
from tessera.util.errors import InputError, OptionError

# Options of the engine: name, kind, what it is.
ENGINE = (
    ("block-size", int, "tokens a block of the cache (16)"),
    ("budget", int, "tokens a step, at most (2048)"),
    ("most-running", int, "sequences a step, at most (256)"),
    ("most-waiting", int, "sequences in the queue; more are answered with 429 (4096)"),
    ("longest", int, "tokens of prompt and answer together (what the model's positions allow)"),
    ("step-seconds", float, "the asked time between tokens: prompts are computed in pieces that keep it"),
    ("speculate", int, "tokens that are guessed from the text so far and verified together (0)"),
    ("draft", str, "a smaller model of the same tokens, which guesses instead: a folder or an artifact"),
)
FLAGS = (
    ("deterministic", "the same request gives the same bits, whatever else runs"),
    ("random-weights", "a config is enough: weights are drawn"),
)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", help="a folder as transformers writes it: config, safetensors, tokenizer; or an artifact"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any that is free (8000)")
    parser.add_argument("--name", help="the model's name to clients (the folder's or the file's)")
    parser.add_argument("--api-key-file", type=Path, help="keys that may ask, one a line; without it anybody may")
    parser.add_argument("--per-key", type=above(0), default=1024, help="requests of one key under way at once (1024)")
    parser.add_argument("--max-body", type=above(0), default=4 << 20, help="bytes of a body, at most (4194304)")
    parser.add_argument("--grace", type=above(0.0), default=30, help="seconds to finish what runs after SIGTERM (30)")
    parser.add_argument("--no-access-log", action="store_true", help="do not log requests")
    parser.add_argument("--memory", default="0.9", help='for the cache: a share of what is free, or "8GB" (0.9)')
    parser.add_argument("--quantize", choices=("int8", "int4", "fp8"), help="weights in fewer bits")
    parser.add_argument("--cache-dtype", choices=("fp8",), help="keys and values in 8 bits")
    for name, kind, told in ENGINE:
        parser.add_argument(f"--{name}", type=kind, help=told)
    for name, told in FLAGS:
        parser.add_argument(f"--{name}", action="store_true", help=told)
    parser.add_argument("--no-reuse", action="store_true", help="compute equal beginnings of prompts every time")
    parser.add_argument("--no-compile", action="store_true", help="run the model as it is")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the best there is")


def options(args: Namespace) -> dict[str, object]:
    """What the engine is made with. It goes to another process as JSON."""
    for name in filter(None, (args.folder, args.draft)):
        if not Path(name).is_file() and not (Path(name) / "config.json").is_file():
            raise InputError(f"{name}: expected a folder with a config.json, or an artifact")
    memory = float(args.memory) if args.memory.replace(".", "", 1).isdecimal() else args.memory
    given = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, *_ in (*ENGINE, *FLAGS)}
    given |= {"quantize": args.quantize, "cache_dtype": args.cache_dtype, "memory": memory}
    given |= {"reuse": not args.no_reuse, "compiled": not args.no_compile, "device": args.device}
    return {"model": args.folder, **{name: value for name, value in given.items() if value is not None}}


def keys_of(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected keys as text, one a line: {error}") from None
    if not keys:
        raise InputError(f"{path}: expected keys, one a line, got none")
    return keys


def needed(module: str) -> ModuleType:
    """A part of the server. The packages it stands on are an extra."""
    try:
        return importlib.import_module(f"tessera.serve.http.{module}")
    except ModuleNotFoundError as error:
        told = f"expected the package {error.name}, which is not installed: pip install tessera[serve]"
        raise OptionError(told) from None


def run(args: Namespace) -> int:
    app, schema, main = needed("app"), needed("schema"), needed("main")
    name = args.name or Path(args.folder).resolve().name.removesuffix(".tess")
    limits, keys = schema.Limits(body=args.max_body), keys_of(args.api_key_file)
    config = app.Config(
        name, tessera.__version__, args.host, args.port, args.grace, keys, args.per_key, limits, not args.no_access_log
    )
    asyncio.run(main.run(options(args), config))
    return 0


COMMAND = Command(arguments, run)
