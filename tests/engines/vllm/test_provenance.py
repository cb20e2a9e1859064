"""The interval map and the arithmetic of strides, against models that treat every byte by itself."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from coldsnap.engines.vllm.provenance import Provenance, Span, Stored
from coldsnap.engines.vllm.strides import Layout, Run, Runs, runs_between

A = Stored(tensor="a", file="m.safetensors", offset=1000, size=24)
B = Stored(tensor="b", file="m.safetensors", offset=1024, size=9)
ROOM = 96


def dense(ptr: int, *shape: int, item: int = 2) -> Layout:
    strides = []
    step = item
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return Layout(ptr=ptr, shape=shape, strides=tuple(reversed(strides)), item_bytes=item)


def transposed(layout: Layout) -> Layout:
    return Layout(ptr=layout.ptr, shape=layout.shape[::-1], strides=layout.strides[::-1], item_bytes=layout.item_bytes)


def offsets(layout: Layout) -> list[int]:
    """The address of every element, in the order of the view."""
    steps = [[i * stride for i in range(size)] for size, stride in zip(layout.shape, layout.strides, strict=True)]
    return [layout.ptr + sum(one) for one in product(*steps)]


def moved(dst: Layout, src: Layout) -> dict[int, int]:
    """Every byte of the destination -> where it comes from, element by element."""
    return {
        there + byte: here + byte
        for there, here in zip(offsets(dst), offsets(src), strict=True)
        for byte in range(dst.item_bytes)
    }


def as_bytes(runs: Runs) -> dict[int, int]:
    return {run.dst + byte: run.src + byte for run in runs.all() for byte in range(run.size)}


layouts = st.builds(
    lambda shape, strides, ptr: (ptr, tuple(shape), tuple(2 * one for one in strides[: len(shape)])),
    st.lists(st.integers(0, 4), max_size=3),
    st.lists(st.integers(0, 12), min_size=3, max_size=3),
    st.integers(0, 50),
)


@given(layouts, st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_runs_are_the_bytes_that_an_element_by_element_copy_moves(
    there: tuple[int, tuple[int, ...], tuple[int, ...]], here: list[int]
) -> None:
    ptr, shape, strides = there
    dst = Layout(ptr=ptr, shape=shape, strides=strides, item_bytes=2)
    src = Layout(ptr=5000, shape=shape, strides=tuple(2 * one for one in here[: len(shape)]), item_bytes=2)
    runs = runs_between(dst, src)
    places = offsets(dst)
    if runs is None:  # refused only where strides do not say that every place is written once
        assert len(shape) > 0
        return
    assert len(set(places)) == len(places)
    assert as_bytes(runs) == moved(dst, src)
    assert runs.num_runs == len(list(runs.all()))
    starts = [run.dst for run in runs.all()]
    assert starts == sorted(starts)


def test_every_place_written_once_by_strides_is_not_refused() -> None:
    assert runs_between(dense(0, 3, 4), transposed(dense(900, 4, 3))) is not None
    assert runs_between(transposed(dense(0, 3, 4)), dense(900, 4, 3)) is not None
    twice = Layout(ptr=0, shape=(3,), strides=(0,), item_bytes=2)
    assert runs_between(twice, dense(900, 3)) is None


def test_the_examples_of_the_module() -> None:
    matrix = dense(0, 16, 32)
    assert list(runs_between(dense(5000, 8, 32), matrix.narrow(0, 8, 8)).all()) == [Run(5000, 512, 512)]  # type: ignore[union-attr]
    columns = runs_between(dense(5000, 16, 8), matrix.narrow(1, 8, 8))
    assert columns is not None
    assert (columns.size, columns.num_runs) == (16, 16)
    turned = runs_between(dense(5000, 32, 16), transposed(matrix))
    assert turned is not None
    assert (turned.size, turned.num_runs) == (2, 512)


def test_two_views_that_are_transposed_alike_are_one_run() -> None:
    runs = runs_between(transposed(dense(5000, 8, 16)), transposed(dense(100, 8, 16)))
    assert runs is not None
    assert list(runs.all()) == [Run(5000, 100, 256)]


def test_parts_of_a_view() -> None:
    cube = dense(100, 3, 4, 5)
    assert cube.size == 120
    assert cube.span == (100, 220)
    assert cube.narrow(1, 1, 2).span == (110, 100 + 2 * 40 + 30)
    assert cube.select(0, 2) == dense(180, 4, 5)
    assert dense(0, 1, 5).expanded((2, 3, 5)).strides == (0, 0, 2)
    assert dense(7, 0, 5).span == (7, 7)


# What can happen to bytes, and what a list with one entry a byte makes of it.

store = st.tuples(st.just("store"), st.integers(0, ROOM - 24), st.sampled_from([A, B]))
spoil = st.tuples(st.just("spoil"), st.integers(0, ROOM - 10), st.integers(0, 10), st.sampled_from(["x", "y"]))
forget = st.tuples(st.just("forget"), st.integers(0, ROOM - 30), st.integers(0, 30))
copy = st.tuples(
    st.just("copy"),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 12),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 15),
)
events = st.lists(st.one_of(store, spoil, forget, copy), max_size=12)


def happen(model: list[object], provenance: Provenance, event: tuple[object, ...]) -> None:
    match event:
        case ("store", int(ptr), Stored() as what):
            provenance.store(ptr, what)
            model[ptr : ptr + what.size] = [(what, at) for at in range(what.size)]
        case ("spoil", int(ptr), int(size), str(reason)):
            provenance.spoil(ptr, size, reason)
            model[ptr : ptr + size] = [reason] * size
        case ("forget", int(ptr), int(size)):
            provenance.forget(ptr, size)
            model[ptr : ptr + size] = [None] * size
        case ("copy", int(dst), int(src), int(size), int(gap), int(count), int(step)):
            runs = [Run(dst + i * (size + gap), src + i * step, size) for i in range(count)]
            provenance.copy(runs, reason="unknown source")
            before = list(model)
            for run in runs:
                for byte in range(run.size):
                    known = before[run.src + byte]
                    model[run.dst + byte] = "unknown source" if known is None else known


@given(events)
def test_the_map_knows_what_a_list_of_bytes_knows(happened: list[tuple[object, ...]]) -> None:
    model: list[object] = [None] * (2 * ROOM)
    provenance = Provenance()
    for event in happened:
        happen(model, provenance, event)
    known: list[object] = [None] * (2 * ROOM)
    spans = list(provenance.within(0, 2 * ROOM))
    for span in spans:
        for byte in range(span.end - span.start):
            known[span.start + byte] = span.what if isinstance(span.what, str) else (span.what, span.at + byte)
    assert known == model
    assert all(one.start < one.end for one in spans)
    assert all(one.end <= two.start for one, two in pairwise(spans))


@given(events, st.integers(0, ROOM), st.integers(0, 40))
def test_a_part_is_asked_for_as_the_whole(happened: list[tuple[object, ...]], ptr: int, size: int) -> None:
    provenance = Provenance()
    model: list[object] = [None] * (2 * ROOM)
    for event in happened:
        happen(model, provenance, event)
    cut = [
        span.part(max(span.start, ptr), min(span.end, ptr + size))
        for span in provenance.within(0, 2 * ROOM)
        if max(span.start, ptr) < min(span.end, ptr + size)
    ]
    assert list(provenance.within(ptr, size)) == cut


def test_the_example_of_the_module() -> None:
    provenance = Provenance()
    q = Stored(tensor="q", file="f", offset=0, size=64)
    provenance.store(100, q)
    provenance.copy([Run(500, 116, 32)], reason="none")
    provenance.spoil(508, 4, "aten.mul_")
    assert list(provenance.within(500, 32)) == [
        Span(500, 508, q, 16),
        Span(508, 512, "aten.mul_", 0),
        Span(512, 532, q, 28),
    ]


def test_pieces_that_continue_each_other_are_one_span() -> None:
    provenance = Provenance()
    provenance.store(0, A)
    provenance.copy([Run(100, 0, 8), Run(108, 8, 8)], reason="none")
    provenance.copy([Run(116, 16, 8)], reason="none")
    assert list(provenance.within(90, 60)) == [Span(100, 124, A, 0)]
