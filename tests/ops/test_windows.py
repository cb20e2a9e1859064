"""The search for weights in a process image finds what is there, wherever it lies, and nothing else."""

from __future__ import annotations

import random

import pytest

from coldsnap.ops.windows import windows_in


@pytest.mark.parametrize("offset", [0, 1, 7, 8, 31, 32, 33, 4096, 10_000 - 64])
def test_a_window_is_found_at_any_offset(offset: int) -> None:
    chooser = random.Random(offset)
    window, other = chooser.randbytes(64), chooser.randbytes(64)
    data = bytearray(10_000)
    data[offset : offset + 64] = window
    assert windows_in(bytes(data), {window, other}) == {window}


def test_part_of_a_window_is_not_a_window() -> None:
    window = random.Random(1).randbytes(64)
    assert windows_in(bytes(40) + window[:63] + bytes(4096), {window}) == set()
