"""`tessera machine NAME`: every number of a machine, and where it comes from.

In: a name or a file. Out: the machine printed; without a name, the names that there are.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tessera.machines import known
from tessera.machines.find import machine, spatial_machines
from tessera.machines.spatial import SpatialMachine
from tessera.tools.command import Command, json_argument, write_json


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="such as lpx or h200, or a TOML or JSON file; without it, all names")
    json_argument(parser)


def run(args: Namespace) -> int:
    if args.name is None:
        names = {"spatial": list(spatial_machines()), "processors": list(known())}
        if not write_json(args, names):
            print("\n".join(f"{kind}: {', '.join(of)}" for kind, of in names.items()))
        return 0
    described = machine(args.name)
    if isinstance(described, SpatialMachine):
        data = {name: [described.value(name), source] for name, source in described.sources.items()}
    else:
        data = described.data()
    if not write_json(args, data):
        print(described)
        if isinstance(described, SpatialMachine):
            print(f"{len(described.assumptions)} of {len(described.sources)} numbers are assumed")
    return 0


COMMAND = Command(arguments, run)
