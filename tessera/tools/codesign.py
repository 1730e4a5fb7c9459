"""`tessera codesign`: what to change in a spatial machine for a model.

In: a model from a file, as `tessera convert` takes it, a machine, and fields with values. Out: the front, what one
percent of each field buys, where more buys nothing, and three changes to ask for.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tessera.spatial.codesign.api import codesign
from tessera.spatial.map import EFFORTS
from tessera.tools import codesign_page, spatial_source
from tessera.tools.command import Command, json_argument, output_file, write_json
from tessera.util.errors import OptionError


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", help=spatial_source.HELP)
    parser.add_argument("--machine", default="toy", help="its name, or a TOML file")
    parser.add_argument("--vary", action="append", default=[], metavar="FIELD=VALUES", help="sram.size=x0.5..x2; many")
    parser.add_argument("--points", type=int, default=4, help="of each range")
    parser.add_argument("--chips", type=int, default=1, help="how many to use")
    parser.add_argument("--effort", choices=EFFORTS, default="quick", help="how many mappings are tried for each point")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument(
        "--report", type=output_file, metavar="FILE", help="write an HTML page: the front, and the rest"
    )
    json_argument(parser)


def run(args: Namespace) -> int:
    if wrong := [given for given in args.vary if "=" not in given]:
        raise OptionError(f"--vary: expected FIELD=VALUES, such as sram.size=x0.5..x2; got {wrong[0]!r}")
    vary = dict(given.split("=", 1) for given in args.vary) or None
    model, example, named = spatial_source.read(args.source)
    answer = codesign(
        model, *example, machine=args.machine, vary=vary, chips=args.chips, points=args.points, effort=args.effort,
        seed=args.seed, **named,
    )  # fmt: skip
    if args.report:
        codesign_page.write(answer, args.report)
    if not write_json(args, answer.data()):
        print(answer)
    return 0


COMMAND = Command(arguments, run)
