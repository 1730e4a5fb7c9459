"""Pipelines on disk: which values each stage reads, gives and sends, beside its programs.

In: a `Pipeline`, and the writer of its programs. Out: data, and from that a `Pipeline` over the values of the programs
that were read. Equations of stages are not kept: a rank runs what was compiled of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tessera.ir.equation import Arg, Value
from tessera.ir.serial import Reader, Writer
from tessera.ir.trace import Trace
from tessera.pipeline.pipelined import Piped, Pipeline
from tessera.transforms.pipelined.cut import Stages
from tessera.transforms.pipelined.orders import orders
from tessera.transforms.pipelined.places import Held


def piped_data(piped: Piped) -> dict[str, object]:
    """Whatever of it decides what is compiled."""
    homes = None if piped.homes is None else [[name, *held] for name, held in piped.homes.items()]
    return {
        "schedule": [str(piped.schedule), piped.schedule.backward, piped.axis, piped.rank],
        "stages": [list(piped.starts), homes],
        "caches": [[*map(list, piped.kept.items())], [*map(list, piped.made.items())]],
    }


def write_held(held: Mapping[str, Held]) -> list:
    return [[name, *each] for name, each in held.items()]


def read_held(data: Iterable[list]) -> dict[str, Held]:
    return {name: Held(owner, tuple(ranks), tuple(stages)) for name, owner, ranks, stages in data}


def write_pipeline(pipeline: Pipeline, writer: Writer) -> dict:
    stages = pipeline.stages

    def numbers(values: Iterable[Value]) -> list[int]:
        return [writer.value(v) for v in values]

    def pairs(values: Mapping[Value, Value]) -> list[list[int]]:
        return [numbers(pair) for pair in values.items()]

    return {
        "count": stages.count,
        "programs": [[*part, writer.trace(_bare(trace))] for part, trace in stages.programs.items()],
        "sends": [[*key, numbers(values)] for key, values in stages.sends.items()],
        "costs": stages.costs,
        "home": [[writer.value(v), stage] for v, stage in stages.home.items()],
        "readers": [[writer.value(v), readers] for v, readers in stages.readers.items()],
        "weights": [list(pipeline.weights), numbers(pipeline.weights.values())],
        "buffers": [list(pipeline.buffers), numbers(pipeline.buffers.values())],
        "batch": numbers(pipeline.batch),
        "cotangents": pairs(pipeline.cotangents),
        "grads": pairs(pipeline.grads),
        "outputs": [writer.arg(v) for v in pipeline.outputs],
        "held": write_held(pipeline.held),
    }


def _bare(trace: Trace) -> Trace:
    return trace.with_(equations=(), constants={})


def read_pipeline(data: dict, reader: Reader, piped: Piped) -> Pipeline:
    def values(numbers: Iterable[int]) -> tuple[Value, ...]:
        return tuple(reader.values[n] for n in numbers)

    def named(key: str) -> dict[str, Value]:
        names, numbers = data[key]
        return dict(zip(names, values(numbers), strict=True))

    stages = Stages(
        data["count"],
        {(kind, stage): reader.trace(number) for kind, stage, number in data["programs"]},
        {(kind, start, to): values(numbers) for kind, start, to, numbers in data["sends"]},
        tuple(data["costs"]),
        {reader.values[n]: stage for n, stage in data["home"]},
        {reader.values[n]: tuple(readers) for n, readers in data["readers"]},
    )
    outputs: tuple[Arg, ...] = tuple(reader.arg(v) for v in data["outputs"])
    cotangents, grads = ({a: b for a, b in map(values, data[key])} for key in ("cotangents", "grads"))
    return Pipeline(
        stages, orders(piped.schedule, stages), named("weights"), named("buffers"), values(data["batch"]), cotangents,
        grads, outputs, read_held(data["held"]),
    )  # fmt: skip
