"""The program that is the first process of a container: it takes what its controller passes it, and is the init.

The container's runtime has made root, mounts and namespaces, and has given nothing of ours but one number: the name of
an abstract Unix socket of the host's network namespace, where the controller listens and passes its descriptors.
Runs on the image's own Python, with coldsnap's code bound beside it: the standard library only.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final, NoReturn

from coldsnap.capsule.channel import Channel
from coldsnap.capsule.init import be_init

__all__ = ["ASK", "NUM_DESCRIPTORS", "address_of", "main"]

ASK: Final = b"descriptors\n"
NUM_DESCRIPTORS: Final = 3
_ABSENT: Final = b"-"


def address_of(number: int) -> str:
    """The abstract address that a number stands for."""
    return f"\0coldsnap-{number:032x}"


def main(number: int) -> NoReturn:
    """Fetch the descriptors, and be the init; a controller that is gone ends it."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address_of(number))
        sock.sendall(ASK)
        said, passed, _, _ = socket.recv_fds(sock, NUM_DESCRIPTORS, NUM_DESCRIPTORS)
    except OSError as error:
        print(f"coldsnap: the controller cannot be reached: {error}", file=sys.stderr)  # noqa: T201 - for its log
        os._exit(1)
    rest = iter(passed)
    descriptors = [-1 if one == _ABSENT[0] else next(rest) for one in said]
    channel = Channel(sock)
    channel.send({"event": "init", "pid": os.getpid()})
    be_init(channel, *descriptors)
