"""A process tree with every kind of memory, to see that each comes back byte for byte.

Run as ``python -I -S memory_tree.py READY_FIFO FILE``, where ``FILE`` has at least 8 MiB of which no page is zero. It
answers JSON lines on ``/run/coldsnap/control.sock``; every connection is one question, whatever it says: the
SHA-256 of each area, by process (``root``, ``child``, ``grandchild``) and name.

    large        24 MiB, each page different; the child changed 4 MiB of its copy, zeroed 2 more, the root changed 2
    zeros        16 MiB of written zeros, but for the first, the middle and the last page
    mixed        4 MiB in which 64 KiB of zeros and of data take turns, from an odd page on
    holes        8 MiB of which half was never touched
    file         8 MiB of a private mapping of FILE: 3 MiB of data written, 2 MiB of zeros, the rest the file's
    read-only    4 MiB, written and then protected
    closed       2 MiB, written and then closed to all access
    quiet-file   2 MiB of a private mapping of FILE, written and then protected
    shared       4 MiB shared by all, of which each process wrote a part
    own          6 MiB that only the child has
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import socket
import sys
from typing import Any

MIB = 1 << 20
PAGE = 4096
READ, WRITE = 1, 2
libc = ctypes.CDLL(None, use_errno=True)


def address_of(area: mmap.mmap) -> int:
    """Where it is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def protect(area: mmap.mmap, protection: int) -> None:
    """Change what may be done to all of it."""
    done = libc.mprotect(ctypes.c_void_p(address_of(area)), ctypes.c_size_t(len(area)), protection)
    if done:
        raise OSError(ctypes.get_errno(), "mprotect")


def private(size: int, descriptor: int = -1) -> mmap.mmap:
    """A private mapping, anonymous unless of a file."""
    flags = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    return mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def fill(area: mmap.mmap, start: int, size: int, seed: int) -> None:
    """Write pages of which no two are equal."""
    block = hashlib.shake_128(seed.to_bytes(4, "little")).digest(MIB)
    for at in range(start, start + size, MIB):
        some = min(MIB, start + size - at)
        area[at : at + some] = block[:some]
    for at in range(start, start + size, PAGE):
        area[at : at + 8] = at.to_bytes(4, "little") + seed.to_bytes(4, "little")


def sums(areas: dict[str, mmap.mmap]) -> dict[str, str]:
    """The digest of each area."""
    found = {}
    for name, area in areas.items():
        if name == "closed":
            protect(area, READ)
        found[name] = hashlib.sha256(area).hexdigest()
        if name == "closed":
            protect(area, 0)
    return found


def serve(areas: dict[str, mmap.mmap], requests: int, answers: int) -> None:
    """Answer each byte with a line."""
    while os.read(requests, 1):
        os.write(answers, json.dumps(sums(areas)).encode() + b"\n")
    os._exit(0)


def ask(requests: int, answers: Any) -> dict[str, str]:
    """The other end of ``serve``."""
    os.write(requests, b".")
    found: dict[str, str] = json.loads(answers.readline())
    return found


def areas_of(path: str) -> dict[str, mmap.mmap]:
    """Everything that exists before anybody is forked."""
    large, zeros, mixed, holes = private(24 * MIB), private(16 * MIB), private(4 * MIB), private(8 * MIB)
    fill(large, 0, len(large), 1)
    zeros[:] = bytes(len(zeros))
    for at in (0, len(zeros) // 2, len(zeros) - PAGE):
        fill(zeros, at, PAGE, 2)
    mixed[:] = bytes(len(mixed))
    for at in range(PAGE, len(mixed) - 64 * 1024, 128 * 1024):
        fill(mixed, at, 64 * 1024, 3)
    for at in range(0, len(holes), 2 * MIB):
        fill(holes, at, MIB, 4)
    descriptor = os.open(path, os.O_RDONLY)
    file, quiet = private(8 * MIB, descriptor), private(2 * MIB, descriptor)
    os.close(descriptor)
    fill(file, 0, 3 * MIB, 5)
    file[3 * MIB : 5 * MIB] = bytes(2 * MIB)
    fill(quiet, 0, len(quiet), 6)
    read_only, closed = private(4 * MIB), private(2 * MIB)
    fill(read_only, 0, len(read_only), 7)
    fill(closed, 0, len(closed), 8)
    protect(quiet, READ)
    protect(read_only, READ)
    protect(closed, 0)
    shared = mmap.mmap(-1, 4 * MIB)
    fill(shared, 0, MIB, 9)
    return {
        "large": large,
        "zeros": zeros,
        "mixed": mixed,
        "holes": holes,
        "file": file,
        "read-only": read_only,
        "closed": closed,
        "quiet-file": quiet,
        "shared": shared,
    }


def be_child(areas: dict[str, mmap.mmap], requests: int, answers: int) -> None:
    """Change some of the copies, then fork a grandchild that changes nothing of its own, and pass on what it says."""
    fill(areas["large"], 4 * MIB, 4 * MIB, 11)
    areas["large"][10 * MIB : 12 * MIB] = bytes(2 * MIB)
    fill(areas["shared"], MIB, MIB, 12)
    own = private(6 * MIB)
    fill(own, 0, len(own), 13)
    areas = {**areas, "own": own}
    their_requests, to_them = os.pipe()
    from_them, their_answers = os.pipe()
    if os.fork() == 0:
        fill(areas["shared"], 2 * MIB, MIB, 14)
        serve(areas, their_requests, their_answers)
    lines = os.fdopen(from_them)
    while os.read(requests, 1):
        both = {"child": sums(areas), "grandchild": ask(to_them, lines)}
        os.write(answers, json.dumps(both).encode() + b"\n")
    os._exit(0)


def main() -> None:
    """Make the tree, then answer questions."""
    fifo, path = sys.argv[1:]
    areas = areas_of(path)
    requests, to_child = os.pipe()
    from_child, answers = os.pipe()
    if os.fork() == 0:
        be_child(areas, requests, answers)
    fill(areas["large"], 14 * MIB, 2 * MIB, 15)
    lines = os.fdopen(from_child)
    ask(to_child, lines)  # it has written what it will write
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("/run/coldsnap/control.sock")
    server.listen(8)
    os.close(os.open(fifo, os.O_WRONLY))
    while True:
        with server.accept()[0] as client, client.makefile("rw") as stream:
            stream.readline()
            stream.write(json.dumps({"root": sums(areas), **ask(to_child, lines)}) + "\n")
            stream.flush()


main()
