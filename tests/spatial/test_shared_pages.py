"""Pages that share their text: what is printed reads back as it was, is never longer, and errors name core and line."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tessera
from tessera.machines.spatial import Core
from tessera.spatial.listing import parse, print_listing, print_page
from tessera.spatial.listing.types import CorePage, Listing
from tessera.spatial.simulator import Violation, judge, simulate
from tessera.spatial.simulator.stepper import step
from tessera.util.errors import ListingError

sys.path.insert(0, str(Path(__file__).parent))

from listings import mlp_on_one, toy  # noqa: E402

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def linear():
    torch.manual_seed(0)
    model = nn.Linear(32, 64, bias=False)
    return model, tessera.map_onto(model, X, machine=toy(chip__grid=[4, 4]), effort="quick")


def shares(text: str) -> int:
    """How many cores have a line in place of a page."""
    return len(re.findall(r"^core \S+ as ", text, re.M))


def checked(listing: Listing) -> str:
    """The text, which reads back as it was and is no longer than with every page written out."""
    text, plain = print_listing(listing), print_listing(listing, share=False)
    assert parse(text) == parse(plain) == listing and print_listing(parse(text)) == text
    assert len(text) <= len(plain) and (len(text) < len(plain)) == (shares(text) > 0)
    return text


def test_small_layers_over_eight_chips_share_most_pages():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    program = tessera.map_onto(model, torch.randn(1, 128), machine="lpx", chips=8, effort="quick")
    text = checked(program.listing)
    assert len(program.listing.pages) == 512 and 512 - shares(text) == 35
    assert len(text) < len(print_listing(program.listing, share=False)) / 3
    assert max(map(len, text.split("\n"))) < 2000


def test_a_product_on_a_mesh_has_two_pages():
    model, x = nn.Linear(512, 512, bias=False).bfloat16(), torch.randn(512, 512).bfloat16()
    program = tessera.map_onto(model, x, machine="wormhole", effort="quick")
    text = checked(program.listing)
    assert len(program.listing.pages) == 64 and 64 - shares(text) == 2


def test_a_shared_listing_runs_and_can_be_edited():
    model, program = linear()
    text = checked(program.listing)
    assert shares(text) == 12
    again = program.edited(text)
    ran = simulate(again.program, X)
    stepped, cycles = step(again.program, X)
    torch.testing.assert_close(ran.outputs[0], model(X), rtol=1e-5, atol=1e-5)
    assert torch.equal(ran.outputs[0], stepped[0]) and ran.cycles == cycles == program.cycles

    # A core that has a line gets a page of its own again.
    core, line = next(re.finditer(r"^core (\S+) as .*$", text, re.M)).group(1, 0)
    page = program.core(*map(int, core.split(",")))
    assert parse(text.replace(line, page)) == program.listing
    # What is changed on a page is changed on all cores that share it.
    shared = next(line for line in text.split("\n") if re.search(r"@\{\d+\+t.*matrix", line))
    longer = parse(text.replace(shared, re.sub(r" (\d+)  sram", lambda match: f" {int(match[1]) + 1}  sram", shared)))
    more = [durations(a) - durations(b) for a, b in zip(longer.pages, program.listing.pages, strict=True)]
    assert sum(more) > 1 and set(more) == {0, 1}


def durations(page: CorePage) -> int:
    return sum(of.duration for of in page.instructions)


def test_a_mutated_line_of_a_shared_page_names_core_cycle_and_line():
    _, program = linear()
    lines = program.stages["listing"].split("\n")
    spots = [number for number, line in enumerate(lines) if re.search(r"@\{\d+\+t", line)]
    cores = {str(page.core) for page in program.listing.pages}
    kinds = set()
    for number in spots:
        new = lines.copy()
        new[number] = re.sub(r"@\{(\d+)", lambda match: f"@{{{int(match[1]) + 1}", lines[number])
        changed = parse("\n".join(new))
        with pytest.raises(Violation) as caught:
            judge(changed, program.machine)
        said = [re.match(r"line (\d+): core (\S+) ", party) for party in caught.value.parties]
        assert str(caught.value.core) in cores and said[0] and all(match and match[2] in cores for match in said)
        assert any(int(match[1]) == number + 1 for match in said if match)
        kinds.add(caught.value.kind)
        with pytest.raises(Violation) as plain:
            judge(parse(print_listing(changed, share=False)), program.machine)
        assert (plain.value.kind, plain.value.core) == (caught.value.kind, caught.value.core)
    assert len(kinds) > 1


def other(rng: random.Random, page: CorePage, head: CorePage) -> CorePage:
    """The page with other times, names, addresses and constants."""
    by, name = rng.randrange(300), rng.choice(["", "_0", "_05", "_17", "_3.0"])
    number = rng.choice(["0", "10", "0.05", "0.5", "7e-05"])
    buffers, steps = [], []
    for of in page.buffers:
        life = None if of.lifetime is None else (of.lifetime[0] + by, of.lifetime[1] + by)
        buffers.append(replace(of, lifetime=life, address=of.address + 32 * rng.randrange(2)))
    for of in page.instructions:
        steps.append(replace(of, start=of.start + by, source=f"x.py:{number}" if of.source else ""))
    new = replace(LISTING, pages=(replace(head, buffers=tuple(buffers), instructions=tuple(steps)),))
    text = re.sub(r"\bw([12])\b", rf"w\1{name}", print_listing(new, share=False))
    return parse(text.replace("gelu(a + b)", f"gelu(a + b * {number})")).pages[0]


LISTING = mlp_on_one().program.listing


def test_random_pages_read_back():
    shared = 0
    for seed in range(60):
        rng = random.Random(seed)
        cores = [Core(rng.randrange(3), 0, i) for i in range(rng.randrange(2, 6))]
        heads = [CorePage(core, note=rng.choice(("", "n", "12 % {1+t}"))) for core in cores]
        pages = tuple(other(rng, LISTING.pages[0], head) for head in heads)
        shared += shares(checked(replace(LISTING, pages=pages)))
    assert shared > 20


HEAD = print_listing(replace(LISTING, pages=()), share=False).rpartition("end ")[0]
PAGE = """core 0,0  # note
  sram  a_{1+n}  float32[4, 4]  0x0000 +64  {3+t}..{9+t}
  @{3+t}  vector  a_{1+n} = {v=exp}(a_1)  1  sram.r0 sram.w0  # {left as it is}
"""


def test_a_shared_page_by_hand():
    others = "core 0,1 as 0,0  t+4 n+2 v=sin\ncore 0,2 as 0,0 t-3\ncore 0,3 as 0,0  # other\n"
    listing = parse(f"{HEAD}{PAGE}{others}end 5\n")
    first, second, third, last = listing.pages
    assert [page.instructions[0].start for page in listing.pages] == [3, 7, 0, 3]
    assert [page.buffers[0].name for page in listing.pages] == ["a_1", "a_3", "a_1", "a_1"]
    assert "@7  vector  a_3 = sin(a_1)" in print_page(second) and second.buffers[0].lifetime == (7, 13)
    assert replace(last, core=first.core, note="note") == first and (third.note, last.note) == ("note", "other")


@pytest.mark.parametrize(
    "lines, said",
    [
        ("core 0,1 as 0,2", "line 9: expected the page of the other core to be written out before"),
        ("core 0,1 as 0,0\ncore 0,2 as 0,1", "line 10: expected the page of the other core to be written out before"),
        ("core 0,1 as 0,0 t+4 s+1 n2=3", "line 9: expected values that the page of 0,0 has holes for; got 'n2 s'"),
        ("core 0,1 as 0,0 t+4 t+5", "line 9: expected one value for each name"),
        ("core 0,1 as 0,0 t-4", "line 9: core 0,1 as 0,0: line 7: expected a number of 0 or more in {3+t}; got t-4"),
        ("core 0,1 as 0,0 t=4", "line 7: expected a number of 0 or more in {3+t}; got t=4"),
        ("core 0,1 as 0,0 v+4", "line 8: expected a word in {v=exp}; got v+4"),
        ("core 0,1 as 0,0 v=exq", "core 0,1 as 0,0: line 8: expected a function out of"),
        ("core 0,1 as 0,0 v=" + "x" * 2000, "line 9: expected `core`"),
        ("core 0,1 as 0,0 t", "line 9: expected `core`, `core … as …` and values"),
        ("core 0,1 as 0,0\n  @3  vector  a = b  1  sram.r0 sram.w0", "line 10: expected instructions between"),
        ("core 0,1 as 0,0\n  sram  a  float32[4, 4]  0x0000 +64  3..9", "line 10: expected buffers between"),
        ("core 0,1 as 0,0 t+999999999999999 ", "core 0,1 as 0,0: line 7: expected `sram  name"),
    ],
)  # fmt: skip
def test_a_wrong_line_of_a_core_is_named(lines, said):
    before = len(HEAD.split("\n"))
    said = re.sub(r"line (\d+)", lambda match: f"line {int(match[1]) - 6 + before}", said)
    with pytest.raises(ListingError, match="^line ") as caught:
        parse(f"{HEAD}{PAGE}{lines}\nend 5\n")
    assert said in str(caught.value) and len(str(caught.value)) < 600


def test_routes_move_with_the_core():
    page = "core 0,1\n  @0  east  send a to {@0,2}  1  sram.r0 link {@0,1>0,2}\n"
    last = parse(f"{HEAD}{page}core 1:3,0 as 0,1\nend 5\n").pages[1].instructions[0]
    assert last.routes == ((Core(1, 3, 0), Core(1, 3, 1)),) and last.action.targets == (Core(1, 3, 1),)
    far = page.replace("{@0,2}", "{@0,0}")
    with pytest.raises(ListingError, match="core 0,0 as 0,1: line .*expected cores of rows and columns of 0 or more"):
        parse(f"{HEAD}{far}core 0,0 as 0,1\nend 5\n")


def test_a_page_for_all_cores_of_the_world_is_refused():
    """What is read of shared pages has a limit, whether or not a line has holes."""
    lines = "".join(f"  @{i}  vector  a = exp(b)  1  sram.r0 sram.w0  # {'x' * 15_000}\n" for i in range(100))
    others = "".join(f"core 0,{i} as 0,0\n" for i in range(1, 400))
    for page in (lines, lines.replace("  vector", "  {u=vector}", 1)):
        with pytest.raises(ListingError, match="268435456 on pages that are shared"):
            parse(f"{HEAD}core 0,0\n{page}{others}end 500\n")
    wide = f"  @0  vector  a = b  1  sram.r0 sram.w0  {'{v=b}' * 1000}\n"
    with pytest.raises(ListingError, match="lines of at most 20000 characters"):
        parse(f"{HEAD}core 0,0\n{wide}core 0,1 as 0,0 v={'b' * 900}\nend 5\n")
