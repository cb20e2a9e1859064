"""vLLM's call that maps memory, by its C name: what it is given, and what becomes of its errors."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldsnap.engines.vllm import native, pages
from coldsnap.engines.vllm.native import loaded, mapping

HANDLE = (0, 4 << 30, 0x7F00_0000_0000, 0x5555_0000_1238)
FILE = Path("/vllm/cumem_allocator.abi3.so")
SENT_BYTES = 16 << 20
"""More than a socket holds."""


class Fake:
    """vLLM's file, with a function that C would call, and its two globals."""

    def __init__(self, *codes: int) -> None:
        self.seen: list[tuple[int, int, int, int]] = []
        self.codes = list(codes)
        self.error_code = ctypes.c_int(0)
        self.error_msg = (ctypes.c_char * 10240)()
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_ulonglong, ctypes.c_ssize_t, ctypes.c_ulonglong, ctypes.c_void_p)
        self.create_and_map = prototype(self._act)

    def _act(self, device: int, size: int, ptr: int, slot: int) -> None:
        self.seen.append((device, size, ptr, slot))
        code = self.codes.pop(0) if self.codes else 0
        if code:
            self.error_code.value = code
            self.error_msg.value = f"CUDA Error: number {code} at cumem_allocator.cpp:151".encode()


class Writes(ctypes.CDLL):
    """The C library under the name of vLLM's file, with `write` for the function. It has no globals of vLLM's."""

    def __init__(self, name: str) -> None:
        assert name == str(FILE)
        super().__init__(None)
        self.create_and_map = self.write


def test_a_handle_arrives_as_it_is() -> None:
    fake = Fake()
    mapping(fake)(HANDLE)
    assert fake.seen == [HANDLE]


def test_an_error_is_told_in_cuda_s_words_and_not_again() -> None:
    fake = Fake(2)
    create_and_map = mapping(fake)
    with pytest.raises(RuntimeError, match=r"^CUDA Error: number 2 at cumem_allocator\.cpp:151$"):
        create_and_map(HANDLE)
    assert fake.error_code.value == 0
    assert fake.error_msg.value == b"", "an error without words would be told in these"
    create_and_map(HANDLE)
    assert len(fake.seen) == 2


def test_an_error_that_somebody_else_left_is_not_this_call_s() -> None:
    fake = Fake()
    fake.error_code.value = 700
    mapping(fake)(HANDLE)
    assert fake.seen == [HANDLE]


def test_a_file_that_is_not_there_or_has_other_names_is_no_file_of_vllm(tmp_path: Path) -> None:
    libc = ctypes.util.find_library("c")
    assert libc is not None
    (tmp_path / "text.so").write_text("no library")
    for path in (tmp_path / "gone.so", tmp_path / "text.so", Path(libc)):
        assert loaded(path) is None


def test_a_file_that_has_the_function_alone_is_no_file_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Writes)
    assert loaded(FILE) is None


def test_python_s_lock_is_free_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is C's `write`: it ends once a thread of Python has read what the socket cannot hold."""
    code, words = ctypes.c_int(0), (ctypes.c_char * 10240)()
    monkeypatch.setattr(ctypes, "CDLL", Writes)
    monkeypatch.setattr(type(code), "in_dll", lambda _, name: {"error_code": code}[name])
    monkeypatch.setattr(type(words), "in_dll", lambda _, name: {"error_msg": words}[name])
    calls = loaded(FILE)
    assert calls is not None
    sent = ctypes.create_string_buffer(os.urandom(SENT_BYTES), SENT_BYTES)
    received = bytearray()
    ours, theirs = socket.socketpair()

    def read() -> None:
        while part := theirs.recv(1 << 20):
            received.extend(part)

    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 60, 0))  # it ends with the lock held
        reader = threading.Thread(target=read)
        reader.start()
        mapping(calls)((ours.fileno(), ctypes.addressof(sent), SENT_BYTES, 0))
        ours.shutdown(socket.SHUT_WR)
        reader.join(60)
    assert received == sent.raw


class Told:
    """A lock that tells when somebody waits for it."""

    def __init__(self, waiting: threading.Event) -> None:
        self._lock, self._waiting = threading.Lock(), waiting

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_calls_at_once_do_not_mix_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, each with its mapping, and one file.

    The first call ends when the second waits for it, or came in too and left its own error.
    """
    fake = Fake()
    first_in, second_here = threading.Event(), threading.Event()
    monkeypatch.setattr(native, "_LOCK", Told(second_here))

    def act(device: int, size: int, ptr: int, slot: int) -> None:
        fake.error_code.value = device
        fake.error_msg.value = f"of {device}".encode()
        if device == 1:
            first_in.set()
            assert second_here.wait(60)
        else:
            second_here.set()

    monkeypatch.setattr(fake, "create_and_map", act)

    def told(device: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            mapping(fake)((device, *HANDLE[1:]))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(told, 1)
        assert first_in.wait(60)
        second = pool.submit(told, 2)
        assert (first.result(60), second.result(60)) == ("of 1", "of 2")


@pytest.mark.parametrize("lib_name", [None, "/vllm/gone.so"])
def test_python_s_call_is_taken_without_the_file(monkeypatch: pytest.MonkeyPatch, lib_name: str | None) -> None:
    vllm = installed(monkeypatch, lib_name)
    assert pages.installed_cumem().create_and_map is vllm.create_and_map


def test_the_file_that_vllm_opened_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = installed(monkeypatch, str(FILE))
    fake = Fake()
    monkeypatch.setattr(pages, "loaded", {FILE: fake}.__getitem__)
    cumem = pages.installed_cumem()
    cumem.create_and_map(HANDLE)
    assert fake.seen == [HANDLE]
    assert cumem.unmap_and_release is vllm.unmap_and_release


def installed(monkeypatch: pytest.MonkeyPatch, lib_name: str | None) -> SimpleNamespace:
    """A vLLM whose Python calls are not to be called."""
    vllm = SimpleNamespace(
        cumem_available=True,
        lib_name=lib_name,
        CuMemAllocator=SimpleNamespace(get_instance=object),
        create_and_map=lambda handle: pytest.fail("vLLM's Python call, which keeps the lock"),
        unmap_and_release=lambda handle: None,
    )
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", vllm)
    return vllm
