"""Pages that processes have in common since a fork: whoever of the two keeps them with CRIU, each gets back its own.

CRIU restores a child by forking it from its restored parent, so a child begins with its parent's pages. What has been
taken out of either's images, or of both, must not show through.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from coldsnap.capsule.criu import Criu
from coldsnap.capsule.criuimages import PAGE_BYTES, read_pagemap, read_parents
from coldsnap.capsule.driver import RunningUnit
from coldsnap.capsule.dump import dump
from coldsnap.capsule.dumped import read_dumped_unit
from coldsnap.capsule.restore import restore
from coldsnap.testing.yard import PATIENCE_S, Yard

from .conftest import newer_criu  # isort: skip

pytestmark = pytest.mark.criu

_NAMES = ("root", "elder", "grandchild", "younger")

# Each case is one slot of every area: what was there before the forks, and what root, elder and grandchild then did
# to it; younger does something else again. Slots of 16 pages make large runs, but for where somebody gave pages back;
# those of 3 pages lie alone, so CRIU keeps them. The order is mixed, so that one process's run is cut where
# another's is not. A question is answered with a checksum a slot.
_FAMILY = """
import itertools, json, mmap, os, random, socket, sys, zlib
P = 4096
CASES = list(itertools.product("-DZ", *["kwzg"] * 3))
random.Random(1).shuffle(CASES)
descriptor = os.open(sys.argv[2], os.O_RDONLY)
areas = {}
for pages, step in ((16, 16), (3, 5)):
    size = len(CASES) * step * P
    for name, fd, extra in (("anonymous", -1, mmap.MAP_ANONYMOUS), ("file", descriptor, 0)):
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        areas[name, pages, step] = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE | extra, prot=protection)

def act(what, seed):
    for (_, pages, step), area in areas.items():
        for number, case in enumerate(CASES):
            start, word = number * step * P, what(case)
            if word in "Dw":
                for page in range(start, start + pages * P, P):
                    area[page : page + P] = (b"%08d" % (page // P + (seed << 20))) * (P // 8)
            elif word in "Zz":
                area[start : start + pages * P] = bytes(pages * P)
            elif word == "g":
                area.madvise(mmap.MADV_DONTNEED, start, pages * P)

def sums():
    return {
        f"{name} {pages}": [zlib.crc32(area[at * step * P : (at * step + pages) * P]) for at in range(len(CASES))]
        for (name, pages, step), area in areas.items()
    }

def other(case):
    return "kwzg"[sum(map("kwzg".index, case[1:])) % 4]

act(lambda case: case[0], 1)
pipes = {name: (os.pipe(), os.pipe()) for name in ("elder", "grandchild", "younger")}

def be(name, what, seed):
    act(what, seed)
    if name == "elder" and os.fork() == 0:
        be("grandchild", lambda case: case[3], 4)
    (requests, _), (_, answers) = pipes[name]
    os.write(answers, b"ready\\n")
    while os.read(requests, 1):
        os.write(answers, json.dumps(sums()).encode() + b"\\n")

for name, what, seed in (("elder", lambda case: case[2], 3), ("younger", other, 5)):
    if os.fork() == 0:
        be(name, what, seed)
act(lambda case: case[1], 2)
lines = {name: os.fdopen(answers, "r") for name, (_, (answers, _)) in pipes.items()}
for name in pipes:
    lines[name].readline()
server = socket.socket(socket.AF_UNIX)
server.bind("/run/coldsnap/control.sock")
server.listen()
os.close(os.open(sys.argv[1], os.O_WRONLY))
while True:
    client, _ = server.accept()
    with client, client.makefile("rw") as stream:
        if stream.readline() == "cases\\n":
            answer = ["".join(case) + other(case) for case in CASES]
        else:
            answer = {"root": sums()}
            for name, ((_, requests), _) in pipes.items():
                os.write(requests, b".")
                answer[name] = json.loads(lines[name].readline())
        stream.write(json.dumps(answer) + "\\n")
"""


def _launch(yard: Yard) -> RunningUnit:
    program, mapped = yard.folder / "family.py", yard.folder / "mapped"
    program.write_text(_FAMILY)
    mapped.write_bytes(b"".join(b"%07x\n" % page * (PAGE_BYTES // 8) for page in range(1, 192 * 16 + 1)))
    command = (sys.executable, "-I", "-S", str(program), str(yard.folder / "u0.fifo"), str(mapped))
    return yard.launch(command=command, files={})


def _pages(images: Path, pid: int) -> tuple[set[int], set[int]]:
    """Addresses of pages that (are in a runs file, are in CRIU's images)."""
    moved = {
        page
        for one in read_dumped_unit(images).memory
        if one.pid == pid
        for address, size in one.pieces
        for page in range(address, address + size, PAGE_BYTES)
    }
    pagemap = read_pagemap((images / f"pagemap-{pid}.img").read_bytes())
    return moved, {page for run in pagemap.runs for page in range(run.address, run.address + run.size, PAGE_BYTES)}


def _differences(yard: Yard, unit: RunningUnit, criu: Criu, freezing: Criu | None = None) -> list[tuple[str, str, str]]:
    """Freeze and restore: (case, process, area) of every slot that is another afterwards."""
    cases, before = yard.ask(unit, "cases"), yard.ask(unit)
    assert len(set(cases)) == 3 * 4**3
    dump(unit, yard.folder / "images", criu=freezing or criu, deadline_s=PATIENCE_S)
    after = yard.ask(yard.keep(restore(yard.spec("back"), yard.folder / "images", criu=criu, deadline_s=PATIENCE_S)))
    return [
        (case, process, area)
        for process in _NAMES
        for area, sums in before[process].items()
        for case, one, two in zip(cases, sums, after[process][area], strict=True)
        if one != two
    ]


def test_every_process_has_its_own_pages_again_and_nobody_else_s(yard: Yard, criu: Criu) -> None:
    assert _differences(yard, _launch(yard), criu) == []

    # Every way in which a child's page and its parent's can be kept occurs, and not just once.
    parents = read_parents((yard.folder / "images" / "pstree.img").read_bytes())
    places = {pid: _pages(yard.folder / "images", pid) for pid in parents}
    assert len(places) == len(_NAMES)
    for child, parent in parents.items():
        if parent:
            for mine, theirs in itertools.product(places[child], places[parent]):
                assert len(mine & theirs) > 8
            assert all(len(mine.difference(*places[parent])) > 8 for mine in places[child]), "the child's alone"
            assert all(len(theirs.difference(*places[child])) > 8 for theirs in places[parent]), "the parent's alone"


@pytest.mark.parametrize("left", [(1001,), (1002,), (1003, 1004)], ids=["root", "elder", "the others"])
def test_images_that_are_not_understood_may_be_anybody_s(yard: Yard, criu: Criu, left: tuple[int, ...]) -> None:
    assert _differences(yard, _launch(yard), criu, newer_criu(yard.folder, criu, left)) == []
    moved = {one.pid for one in read_dumped_unit(yard.folder / "images").memory}
    assert moved == {1001, 1002, 1003, 1004} - set(left)
