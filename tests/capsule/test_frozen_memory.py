"""Stable memory across a real dump and restore: no page in the image, and the same object goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coldsnap.capsule.criu import Criu
from coldsnap.capsule.driver import RunningUnit
from coldsnap.capsule.dump import dump
from coldsnap.capsule.restore import restore
from coldsnap.testing.yard import PATIENCE_S, Yard

pytestmark = pytest.mark.criu

MIB = 1024 * 1024
WEIGHTS_MIB = 64

# Holds weights, unmaps them, says so, and then does what it is asked over its socket: one line, one JSON back.
_HOLDER = f"""
import json, socket, sys
from pathlib import Path
from coldsnap.errors import ResourceBusy
from coldsnap.hydrate import HostMemory, ProvedSource, Segment, hydrate_file, libc
from coldsnap.hydrate.maps import overlapping, read_maps

memory = HostMemory()
weights = memory.reserve({WEIGHTS_MIB} << 20, tag="weights")
other = memory.reserve(1 << 20, tag="other", address=0x500100000000)
memory.view(weights.ptr, weights.size)[:] = b"\\xab" * weights.size
memory.unmap()
server = socket.socket(socket.AF_UNIX)
server.bind("/run/coldsnap/control.sock")
server.listen()
open(sys.argv[1], "wb").close()

def state():
    rights = [sorted({{e.rights for e in overlapping(read_maps(), a.ptr, a.ptr + a.size)}}) for a in memory.allocations]
    return {{"mapped": memory.mapped, "ptrs": [a.ptr for a in memory.allocations], "rights": rights}}

def remap():
    memory.remap()
    return {{**state(), "zero": not any(memory.view(weights.ptr, 4096)) and not any(memory.view(other.ptr, 4096))}}

def fill():
    with open(sys.argv[2], "rb") as file:
        source = ProvedSource(fd=file.fileno(), bytes=weights.size, evidence="written by this test")
        hydrate_file(source, [Segment(ptr=weights.ptr, size=weights.size, file_offset=0)], memory)
    return bytes(memory.view(weights.ptr, 8)).hex()

def steal():
    libc.unmap(other.ptr, 4096)
    libc.map_anonymous(other.ptr, 4096, writable=True, replace=False)
    try:
        memory.remap()
    except ResourceBusy as error:
        return str(error)

while True:
    client, _ = server.accept()
    with client, client.makefile("rw") as lines:
        answer = {{"state": state, "remap": remap, "fill": fill, "steal": steal}}[lines.readline().strip()]()
        lines.write(json.dumps(answer) + "\\n")
"""


def _launch(yard: Yard) -> RunningUnit:
    program = yard.folder / "holder.py"
    program.write_text(_HOLDER)
    weights = yard.folder / "weights"
    weights.write_bytes(bytes(range(256)) * (WEIGHTS_MIB * MIB // 256))
    fifo = yard.folder / "u0.fifo"
    return yard.launch(command=(sys.executable, str(program), str(fifo), str(weights)), files={})


def _freeze(yard: Yard, unit: RunningUnit, criu: Criu) -> Path:
    images = yard.folder / "images"
    dump(unit, images, criu=criu, deadline_s=PATIENCE_S)
    return images


def _thaw(yard: Yard, images: Path, criu: Criu, name: str) -> RunningUnit:
    return yard.keep(restore(yard.spec(name), images, criu=criu, deadline_s=PATIENCE_S))


def test_unmapped_weights_are_in_no_image_and_come_back_in_place(yard: Yard, criu: Criu) -> None:
    unit = _launch(yard)
    before = yard.ask(unit)
    assert before["rights"] == [["---p"], ["---p"]]
    images = _freeze(yard, unit, criu)
    assert sum(path.stat().st_size for path in images.glob("pages-*.img")) < WEIGHTS_MIB * MIB / 2
    assert not any(b"\xab" * 4096 in path.read_bytes() for path in images.glob("pages-*.img"))

    back = _thaw(yard, images, criu, "back")
    assert yard.ask(back) == before
    mapped = yard.ask(back, "remap")
    assert mapped == {"mapped": True, "ptrs": before["ptrs"], "rights": [["rw-p"], ["rw-p"]], "zero": True}
    assert yard.ask(back, "fill") == "0001020304050607"


def test_a_place_that_was_taken_meanwhile_is_refused(yard: Yard, criu: Criu) -> None:
    unit = _launch(yard)
    back = _thaw(yard, _freeze(yard, unit, criu), criu, "back")
    refusal = yard.ask(back, "steal")
    assert "0x500100000000" in refusal
    assert "rw-p" in refusal
    assert yard.ask(back)["mapped"] is False
