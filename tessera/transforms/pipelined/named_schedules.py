"""The schedules that have a name.

    gpipe         all forwards, then all backwards
    1f1b          after a start, a forward and a backward in turn: a rank holds at most as many microbatches as there
                  are ranks
    interleaved   1f1b over two stages a rank, a round of ranks apart: half the bubble
    zero-bubble   1f1b with backward in two parts, of which gradients of weights fill the pauses
    dualpipe      zero-bubble over two stages a rank that lie in a V: the last rank has the two in the middle, the first
                  one the first and the last. A rank pauses as long as a microbatch takes to the bottom of the V

In: numbers of ranks and microbatches. Out: a `Schedule`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tessera.transforms.pipelined.schedule import Action, Schedule
from tessera.util.errors import OptionError

WORDS = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe")


def chunks_of(word: str) -> int:
    """How many stages a rank has."""
    return 2 if word in ("interleaved", "dualpipe") else 1


def idle_share(ranks: int, microbatches: int) -> float:
    """Of the time, what a rank waits under 1f1b."""
    return (ranks - 1) / (microbatches + ranks - 1)


def schedule(word: str, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The schedule of that name; `chunks` are the stages of a rank under "interleaved"."""
    if word not in WORDS:
        raise OptionError(f"schedule: expected one of {', '.join(WORDS)}, got {word!r}")
    if microbatches < ranks and ranks > 1:
        raise OptionError(
            f"schedule: expected {ranks} microbatches or more for {ranks} stages, got {microbatches}: "
            f"ranks would do nothing for {idle_share(ranks, microbatches):.0%} of the time"
        )
    match word:
        case "gpipe":
            rows = [_each("F", microbatches, r) + _each("B", microbatches, r) for r in range(ranks)]
        case "1f1b":
            rows = [_one_by_one(ranks, r, microbatches) for r in range(ranks)]
        case "interleaved":
            return Schedule(ranks * chunks, microbatches, tuple(_interleaved(ranks, microbatches, chunks)))
        case "dualpipe":
            return _in_a_v(ranks, microbatches)
        case _:
            return _zero_bubble(ranks, microbatches)
    return Schedule(ranks, microbatches, tuple(map(tuple, rows)))


def _each(kind: str, microbatches: int, stage: int) -> list[Action]:
    return [Action(kind, m, stage) for m in range(microbatches)]


def _one_by_one(ranks: int, rank: int, microbatches: int) -> list[Action]:
    return _alternating(ranks - rank - 1, _each("F", microbatches, rank), _each("B", microbatches, rank))


def _alternating(warm: int, forwards: Sequence[Action], backwards: Sequence[Action]) -> list[Action]:
    """Some forwards, then one of each in turn, then the backwards that are left."""
    warm = min(warm, len(forwards))
    row, rest = list(forwards[:warm]), list(backwards)
    for forward in forwards[warm:]:
        row += [forward, rest.pop(0)]
    return row + rest


def _interleaved(ranks: int, microbatches: int, chunks: int) -> Iterator[tuple[Action, ...]]:
    """Every rank has several stages, a round of ranks apart; microbatches go through them in groups as large as the
    number of ranks."""
    if microbatches % ranks:
        raise OptionError(f"schedule: interleaved expects microbatches that {ranks} ranks divide, got {microbatches}")
    groups = range(0, microbatches, ranks)
    for rank in range(ranks):
        forwards = [
            Action("F", m, chunk * ranks + rank) for g in groups for chunk in range(chunks) for m in range(g, g + ranks)
        ]
        backwards = [
            Action("B", m, chunk * ranks + rank)
            for g in groups for chunk in reversed(range(chunks)) for m in range(g, g + ranks)
        ]  # fmt: skip
        yield tuple(_alternating((ranks - rank - 1) * 2 + (chunks - 1) * ranks, forwards, backwards))


def _zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """As 1f1b, with backward split: rank r makes gradients of weights r microbatches late, to fill its pauses. No
    rank holds more microbatches than under 1f1b the first one does."""
    rows = []
    for rank in range(ranks):
        row, late = [], _each("W", microbatches, rank)
        for action in _one_by_one(ranks, rank, microbatches):
            row.append(action)
            if action.kind == "B" and action.microbatch >= rank:
                row.append(late.pop(0))
        rows.append((*row, *late))
    return Schedule(ranks, microbatches, tuple(rows))


def _in_a_v(ranks: int, microbatches: int) -> Schedule:
    """Every rank does what is ready: a backward if there is one, then gradients of weights, then a forward; of two the
    one of the later stage. No rank holds more than 1f1b's first one does."""
    stages = 2 * ranks
    waiting = [
        [_each(kind, microbatches, s) for kind in "BWF" for s in (stages - 1 - rank, rank)] for rank in range(ranks)
    ]
    return Schedule(stages, microbatches, tuple(_as_ready(waiting, stages, set())))


def in_passes(home: Mapping[int, int], microbatches: int, backward: bool) -> Schedule:
    """All forwards, then, once a caller has seen the results, all backwards; `home` is the rank of each stage. Ranks do
    what is ready, of two forwards the one of the later stage, of two backwards that of the earlier."""
    stages, ranks, ended = len(home), range(max(home.values()) + 1), set[Action]()
    own = [[s for s in range(stages) if home[s] == rank] for rank in ranks]
    rows = _as_ready([[_each("F", microbatches, s) for s in reversed(mine)] for mine in own], stages, ended)
    if backward:
        back = _as_ready([[_each("B", microbatches, s) for s in mine] for mine in own], stages, ended)
        rows = [(*first, *then) for first, then in zip(rows, back, strict=True)]
    return Schedule(stages, microbatches, tuple(rows), backward)


def _as_ready(waiting: list[list[list[Action]]], stages: int, ended: set[Action]) -> list[tuple[Action, ...]]:
    """The rows of ranks that each do the first action that is ready of their queues."""
    rows: list[list[Action]] = [[] for _ in waiting]
    while any(queue for queues in waiting for queue in queues):
        now = []
        for row, queues in zip(rows, waiting, strict=True):
            heads = (queue for queue in queues if queue)
            ready = (queue for queue in heads if all(need in ended for need in queue[0].needs(stages, True)))
            if (queue := next(ready, None)) is not None:
                row.append(queue.pop(0))
                now.append(row[-1])
        ended.update(now)
    return [tuple(row) for row in rows]
