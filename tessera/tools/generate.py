"""`tessera generate FOLDER "text"`: what a model goes on to say, written as it comes."""

from __future__ import annotations

import itertools
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

import tessera
from tessera.tools.command import Command, chosen_device, json_argument, write_json
from tessera.util import cuda_context
from tessera.util.errors import InputError
from tessera.util.log import log
from tessera.util.phases import account, phase

# Of `Sampling`, with its defaults but for max_tokens: arguments are read before PyTorch is imported.
SETTINGS: dict[str, tuple[type, float | None]] = {
    "max_tokens": (int, 64), "min_tokens": (int, 0), "temperature": (float, 1.0), "top_k": (int, 0),
    "top_p": (float, 1.0), "min_p": (float, 0.0), "presence_penalty": (float, 0.0), "frequency_penalty": (float, 0.0),
    "repetition_penalty": (float, 1.0), "seed": (int, None),
}  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", help="a folder as transformers writes it: config, safetensors, tokenizer; or an artifact"
    )
    parser.add_argument("prompt", help="the text to go on from")
    for name, (kind, default) in SETTINGS.items():
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
    cuda_context.begin(args.device)
    with phase("imports"):
        engine_of, sampling_of = tessera.Engine, tessera.Sampling
    engine = engine_of(
        args.folder, memory=args.memory, quantize=args.quantize, random_weights=args.random_weights,
        compiled=not args.no_compile, device=chosen_device(args), most_running=1,
    )  # fmt: skip
    if engine.tokenizer is None:
        raise InputError(f"{args.folder}: expected a tokenizer (tokenizer.json), got none")
    settings = {name: getattr(args, name) for name in SETTINGS}
    stream = engine.submit(args.prompt, sampling_of(**settings, stop=tuple(args.stop), ignore_eos=args.ignore_eos))
    if args.json:
        write_json(args, asdict(stream.whole()[0]))
        return 0
    with phase("first token"):
        pieces = iter(stream)
        first = next(pieces)
    for piece in itertools.chain([first], pieces):
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        if piece is first:
            log(1, f"generate: the first token came after {account()}")
    sys.stdout.write("\n")
    return 0


COMMAND = Command(arguments, run)
