"""vLLM's call that maps memory, by its C name: what it is given, and what becomes of its errors."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path

import pytest

from coldsnap.engines.vllm.native import loaded, mapping

HANDLE = (0, 4 << 30, 0x7F00_0000_0000, 0x5555_0000_1238)


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


def test_python_s_lock_is_free_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes keeps the lock for `PyDLL` alone."""
    opened: list[str] = []

    class Library(ctypes.CDLL):
        def __init__(self, name: str) -> None:
            opened.append(name)
            super().__init__(None)

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert not issubclass(Library, ctypes.PyDLL)
    assert loaded(Path("/vllm/cumem_allocator.abi3.so")) is None, "this process has no such function"
    assert opened == ["/vllm/cumem_allocator.abi3.so"]
