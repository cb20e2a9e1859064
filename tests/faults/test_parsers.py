"""No parser raises anything but coldsnap's own errors, whatever is done to an input that a capture wrote."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.errors import ColdsnapError
from coldsnap.testing.faults.parsers import Parser, fuzz, mutate, parsers

NAMES = (
    "artifact",
    "capsule-config",
    "capsule-index",
    "capsule-manifest",
    "failures",
    "frames",
    "lease",
    "native-manifest",
    "overlay",
    "prepared-record",
    "receipt",
    "recipe",
    "recovery-manifest",
    "request",
    "safetensors",
    "service-record",
    "settings",
    "timing",
    "unit-file",
    "validation-record",
)


@pytest.fixture(scope="module")
def every(captured: tuple[Path, Path]) -> dict[str, Parser]:
    return parsers(*captured)


def test_every_parser_accepts_its_own_input(every: dict[str, Parser]) -> None:
    assert tuple(sorted(every)) == NAMES
    for parser in every.values():
        parser.parse(parser.valid)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_mutated_input_is_accepted_or_refused(every: dict[str, Parser], name: str, data: st.DataObject) -> None:
    valid = every[name].valid
    pieces = data.draw(st.lists(st.tuples(st.integers(0, len(valid)), st.integers(0, 64)), max_size=4))
    changed = valid
    for at, size in pieces:
        put = data.draw(
            st.one_of(
                st.binary(max_size=20),
                st.sampled_from(
                    [b"NaN", b"1e999", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\\ud800", b"\x00", b"null"]
                ),
            )
        )
        changed = changed[:at] + put + changed[at + size :]
    with contextlib.suppress(ColdsnapError):
        every[name].parse(changed)


@given(seed=st.integers(0, 1 << 32), data=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_mutations_are_repeatable_and_of_any_data(seed: int, data: bytes) -> None:
    once, twice = (mutate(data, random.Random(seed)) for _ in range(2))
    assert once == twice


def test_a_parser_that_raises_something_else_is_found() -> None:
    def parse(data: bytes) -> object:
        if data != b"valid":
            raise KeyError(data)
        return data

    tally = fuzz(Parser(name="bad", parse=parse, valid=b"valid"), num_inputs=30, seed=1)
    assert tally.inputs == 30
    assert len(tally.wrong) + tally.accepted == 30
    assert len(tally.wrong) > 20
    assert tally.wrong[0].startswith("KeyError")
