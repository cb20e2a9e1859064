"""The rule that decides which bytes are the model's."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.extents import Allocation, residual_ranges
from coldsnap.engines.observer import AMBIGUOUS, PARTLY, UNOBSERVED, Label, Observer, reason_bytes
from coldsnap.errors import InternalError

ARENA = (Allocation(ptr=0x10000, size=0x4000, tag="weights"),)


def test_neighbours_stay_apart_and_each_keeps_its_source() -> None:
    observer = Observer()
    observer.wrote(0x10040, 64, tensor="b", file="m.safetensors", file_offset=264)
    observer.wrote(0x10000, 64, tensor="a", file="m.safetensors", file_offset=200)
    extents = observer.observation(ARENA).extents
    assert [(one.range.ptr, one.range.size, one.range.tensors) for one in extents] == [
        (0x10000, 64, (("a", 0, 64),)),
        (0x10040, 64, (("b", 0, 64),)),
    ]
    assert [write.file_offset for one in extents for write in one.writes] == [200, 264]


@given(cuts=st.sets(st.integers(1, 255), max_size=6), order=st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_a_loaders_chunk_size_never_shows(cuts: set[int], order: Random) -> None:
    edges = [0, *sorted(cuts), 256]
    chunks = list(pairwise(edges))
    order.shuffle(chunks)
    observer = Observer()
    for begin, end in chunks:
        observer.wrote(0x10000 + begin, end - begin, tensor="a", file="f", file_offset=900 + begin, tensor_offset=begin)
    (extent,) = observer.observation(ARENA).extents
    assert extent.range.tensors == (("a", 0, 256),)
    (write,) = extent.writes
    assert (write.ptr, write.size, write.file_offset, write.tensor_offset) == (0x10000, 256, 900, 0)


def test_an_alias_of_the_same_bytes_is_one_extent_filled_once() -> None:
    observer = Observer()
    observer.wrote(0x10000, 256, tensor="fused", file="f", file_offset=1000)
    observer.wrote(0x10040, 64, tensor="part", file="f", file_offset=1064)
    observer.wrote(0x100C0, 128, tensor="tail", file="f", file_offset=1192)
    (extent,) = observer.observation(ARENA).extents
    assert (extent.range.ptr, extent.range.size) == (0x10000, 0x140)
    assert extent.range.tensors == (("fused", 0, 256), ("part", 64, 64), ("tail", 192, 128))
    assert [(w.ptr, w.size, w.tensor, w.file_offset, w.tensor_offset) for w in extent.writes] == [
        (0x10000, 256, "fused", 1000, 0),
        (0x10100, 64, "tail", 1256, 64),
    ]


def test_two_sources_of_one_byte_leave_the_whole_group_residual() -> None:
    observer = Observer()
    observer.wrote(0x10000, 256, tensor="a", file="f", file_offset=1000)
    observer.wrote(0x10080, 256, tensor="b", file="f", file_offset=5000)
    observation = observer.observation(ARENA)
    assert observation.extents == ()
    assert observation.labels == (Label(ptr=0x10000, size=0x180, reason=AMBIGUOUS),)


@pytest.mark.parametrize("first", ["write", "label"])
def test_one_byte_that_cannot_be_replayed_takes_its_tensor_out(first: str) -> None:
    observer = Observer()
    if first == "label":
        observer.unreplayable(0x10050, 1, "rounded")
    observer.wrote(0x10000, 64, tensor="a", file="f", file_offset=0)
    observer.wrote(0x10040, 64, tensor="b", file="f", file_offset=64)
    if first == "write":
        observer.unreplayable(0x10050, 1, "rounded")
    observation = observer.observation(ARENA)
    assert [one.range.ptr for one in observation.extents] == [0x10000]
    left = residual_ranges(ARENA, [(0x10000, 64)])
    assert reason_bytes([(ptr, size) for ptr, size, _ in left], observation.labels) == {
        "rounded": 64,
        UNOBSERVED: 0x4000 - 128,
    }


def test_a_label_that_only_touches_spoils_nothing() -> None:
    observer = Observer()
    observer.unreplayable(0x10000, 64, "before")
    observer.wrote(0x10040, 64, tensor="a", file="f", file_offset=0)
    observer.unreplayable(0x10080, 64, "after")
    assert len(observer.observation(ARENA).extents) == 1


def test_a_write_outside_every_allocation_is_our_bug() -> None:
    observer = Observer()
    observer.wrote(0x13FFF, 2, tensor="a", file="f", file_offset=0)
    with pytest.raises(InternalError, match="0x13fff"):
        observer.observation(ARENA)


@given(
    labels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from("xyz")), max_size=8),
    residual=st.sets(st.integers(0, 80), max_size=40),
)
@settings(max_examples=100)
def test_reasons_account_for_every_residual_byte(labels: list[tuple[int, int, str]], residual: set[int]) -> None:
    made = [Label(ptr=ptr, size=size, reason=reason) for ptr, size, reason in labels]
    expected: dict[str, int] = {}
    for byte in residual:
        reason = UNOBSERVED
        for label in made:
            if label.ptr <= byte < label.ptr + label.size:
                reason = label.reason
        expected[reason] = expected.get(reason, 0) + 1
    assert reason_bytes([(byte, 1) for byte in residual], made) == expected


class TestWithin:
    """Pieces of one parameter, told one by one."""

    ROWS, ROW, FULL = 8, 32, 96  # a slice of 32 of each row's 96 bytes

    def sliced(self, observer: Observer, *, base: int = 0x10000, skip: int = 32, within: bool = True) -> None:
        size = self.ROWS * self.ROW
        for row in range(self.ROWS):
            observer.wrote(
                base + row * self.ROW,
                self.ROW,
                tensor="o_proj",
                file="f",
                file_offset=1000 + row * self.FULL + skip,
                tensor_offset=row * self.FULL + skip,
                within=(base, size) if within else None,
            )

    def test_the_rows_of_a_slice_are_one_extent_of_as_many_pieces(self) -> None:
        observer = Observer()
        self.sliced(observer)
        (extent,) = observer.observation(ARENA).extents
        assert (extent.range.ptr, extent.range.size) == (0x10000, 256)
        assert extent.range.tensors == (("o_proj", 0, 256),)
        assert [(w.ptr, w.size, w.file_offset) for w in extent.writes] == [
            (0x10000 + 32 * row, 32, 1032 + 96 * row) for row in range(8)
        ]

    def test_without_a_destination_each_row_stands_alone(self) -> None:
        observer = Observer()
        self.sliced(observer, within=False)
        assert len(observer.observation(ARENA).extents) == 8

    @pytest.mark.parametrize("gap", [0, 64])
    def test_a_tensor_split_over_two_parameters_gives_the_same_extents_wherever_they_lie(self, gap: int) -> None:
        """Else a neighbour would decide what the pack holds."""
        observer = Observer()
        for half in (0, 1):
            ptr = 0x10000 + half * (64 + gap)
            observer.wrote(
                ptr, 64, tensor="qk", file="f", file_offset=64 * half, tensor_offset=64 * half, within=(ptr, 64)
            )
        extents = observer.observation(ARENA).extents
        assert [one.range.tensors for one in extents] == [(("qk", 0, 64),), (("qk", 0, 64),)]

    def test_tensors_that_make_up_one_parameter_stay_apart(self) -> None:
        observer = Observer()
        for index, name in enumerate(("gate", "up")):
            observer.wrote(
                0x10000 + 64 * index, 64, tensor=name, file="f", file_offset=64 * index, within=(0x10000, 128)
            )
        assert [one.range.tensors for one in observer.observation(ARENA).extents] == [
            (("gate", 0, 64),),
            (("up", 0, 64),),
        ]

    def test_the_rest_of_a_parameter_written_in_part_is_residual_and_says_so(self) -> None:
        observer = Observer()
        observer.wrote(0x10100, 200, tensor="embed", file="f", file_offset=0, within=(0x10000, 1024))
        observer.unreplayable(0x10000 + 1000, 24, "zero for the padding")
        observation = observer.observation(ARENA)
        (extent,) = observation.extents
        assert (extent.range.ptr, extent.range.size) == (0x10100, 200)
        left = residual_ranges(ARENA, [(0x10100, 200)])
        assert reason_bytes([(ptr, size) for ptr, size, _ in left], observation.labels) == {
            PARTLY: 1024 - 200 - 24,
            "zero for the padding": 24,
            UNOBSERVED: 0x4000 - 1024,
        }

    def test_one_byte_of_a_slice_that_cannot_be_replayed_takes_all_of_it_out(self) -> None:
        observer = Observer()
        self.sliced(observer)
        observer.unreplayable(0x10000 + 100, 1, "rounded")
        observation = observer.observation(ARENA)
        assert observation.extents == ()
        left = residual_ranges(ARENA, [])
        assert reason_bytes([(ptr, size) for ptr, size, _ in left], observation.labels) == {
            "rounded": 256,
            UNOBSERVED: 0x4000 - 256,
        }

    def test_a_view_of_a_slice_is_the_same_extent(self) -> None:
        """A tied parameter that looks at two rows of it, and is filled from the same bytes of the file."""
        observer = Observer()
        self.sliced(observer)
        observer.wrote(0x10000 + 64, 32, tensor="view", file="f", file_offset=1000 + 2 * 96 + 32, tensor_offset=224)
        (extent,) = observer.observation(ARENA).extents
        assert extent.range.tensors == (("o_proj", 0, 256), ("view", 64, 32))
        assert sum(write.size for write in extent.writes) == 256

    @pytest.mark.parametrize(("ptr", "size"), [(0x10000 - 1, 4), (0x10000 + 61, 4)])
    def test_a_copy_outside_its_own_parameter_is_a_bug(self, ptr: int, size: int) -> None:
        with pytest.raises(InternalError, match="within 64 bytes"):
            Observer().wrote(ptr, size, tensor="a", file="f", file_offset=0, within=(0x10000, 64))

    @given(order=st.randoms(use_true_random=False), cuts=st.sets(st.integers(1, 255), max_size=8))
    @settings(max_examples=50)
    def test_neither_order_nor_chunks_of_the_rows_show(self, order: Random, cuts: set[int]) -> None:
        edges = sorted({*range(0, 257, 32), *cuts})
        chunks = list(pairwise(edges))
        order.shuffle(chunks)
        observer, plain = Observer(), Observer()
        for begin, end in chunks:
            row, column = divmod(begin, 32)
            place = row * 96 + 32 + column
            observer.wrote(
                0x10000 + begin,
                end - begin,
                tensor="o_proj",
                file="f",
                file_offset=1000 + place,
                tensor_offset=place,
                within=(0x10000, 256),
            )
        self.sliced(plain)
        assert observer.observation(ARENA) == plain.observation(ARENA)
