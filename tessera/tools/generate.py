"""`tessera generate FOLDER "text"`: what a model goes on to say, written as it comes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, fields

from tessera.serve.engine import Engine
from tessera.serve.sampling import Sampling
from tessera.tools.command import Command, chosen_device, json_argument, write_json
from tessera.util.errors import InputError

SETTINGS = {
    "max_tokens": int, "min_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float,
    "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float, "seed": int,
}  # fmt: skip
_DEFAULTS = {field.name: field.default for field in fields(Sampling)}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", help="a folder as transformers writes it: config, safetensors, tokenizer; or an artifact"
    )
    parser.add_argument("prompt", help="the text to go on from")
    for name, kind in SETTINGS.items():
        default = 64 if name == "max_tokens" else _DEFAULTS[name]
        told = "another one each time" if default is None else default
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"default: {told}")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end")
    parser.add_argument("--quantize", choices=("int8", "int4", "fp8"), help="weights in fewer bits")
    parser.add_argument("--memory", default="2GB", help='for the cache, such as "2GB"')
    parser.add_argument("--random-weights", action="store_true", help="a config is enough: weights are drawn")
    parser.add_argument("--no-compile", action="store_true", help="run the model as it is")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the best there is")
    json_argument(parser)


def run(args: Namespace) -> int:
    engine = Engine(
        args.folder, memory=args.memory, quantize=args.quantize, random_weights=args.random_weights,
        compiled=not args.no_compile, device=chosen_device(args), most_running=1,
    )  # fmt: skip
    if engine.tokenizer is None:
        raise InputError(f"{args.folder}: expected a tokenizer (tokenizer.json), got none")
    settings = {name: getattr(args, name) for name in SETTINGS}
    stream = engine.submit(args.prompt, Sampling(**settings, stop=tuple(args.stop), ignore_eos=args.ignore_eos))
    if args.json:
        write_json(args, asdict(stream.whole()[0]))
        return 0
    for piece in stream:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


COMMAND = Command(arguments, run)
