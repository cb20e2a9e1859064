"""What loaders and finalizers of vLLM do to tensors, with plain torch: which bytes are still the checkpoint's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coldsnap.core.extents import PAGE_BYTES, Allocation
from coldsnap.engines.observer import Observation, Observer, reason_bytes
from coldsnap.engines.safetensors import read_header
from coldsnap.engines.vllm.account import BETWEEN, UNWRITTEN, account
from coldsnap.engines.vllm.provenance import Span, Stored
from coldsnap.engines.vllm.sources import Sources
from coldsnap.engines.vllm.storages import storages_of
from coldsnap.engines.vllm.tracing import NOT_DENSE, REPEATED, TOO_SMALL, Tracer

HIDDEN = 256  # a row of bfloat16 is 512 bytes


def random_bytes(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=generator).to(dtype)


class Bench:
    """A checkpoint, read as a loader reads it, under a tracer; and the truth, from the file's own bytes."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.path = folder / "model.safetensors"
        save_file(tensors, self.path)
        self.tracer = Tracer()
        self._sources = Sources([read_header(self.path)])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in load_file(self.path).items():
            stored = self._sources.find(name, str(tensor.dtype), tensor.shape)
            assert stored is not None
            self.tracer.loaded(tensor, stored)
            yield name, tensor

    def spans(self, tensor: torch.Tensor) -> list[Span]:
        storage = tensor.untyped_storage()
        return list(self.tracer.provenance.within(storage.data_ptr(), storage.nbytes()))

    def share(self, tensor: torch.Tensor) -> float:
        """How much of the memory behind it is claimed to be stored; every claim is compared with the file."""
        content = self.path.read_bytes()
        claimed = 0
        for span in self.spans(tensor):
            if isinstance(span.what, Stored):
                start = span.what.offset + span.at
                held = ctypes.string_at(span.start, span.end - span.start)
                assert held == content[start : start + len(held)], span
                claimed += len(held)
        return claimed / int(tensor.untyped_storage().nbytes())

    def tensors(self, tensor: torch.Tensor) -> list[str]:
        return [span.what.tensor if isinstance(span.what, Stored) else span.what for span in self.spans(tensor)]


BenchMaker = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> BenchMaker:
    return lambda **tensors: Bench(tmp_path, tensors)


def test_fused_qkv_and_gate_up_are_their_parts(bench: BenchMaker) -> None:
    at = bench(
        q=random_bytes(64, HIDDEN),
        k=random_bytes(32, HIDDEN),
        v=random_bytes(32, HIDDEN),
        gate=random_bytes(96, HIDDEN),
    )
    qkv = torch.nn.Parameter(torch.empty(128, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
    gate_up = torch.nn.Parameter(torch.zeros(192, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
    places = {"q": (0, 64), "k": (64, 32), "v": (96, 32)}
    with at.tracer:
        for name, tensor in at.weights():
            if name in places:
                qkv.data.narrow(0, *places[name]).copy_(tensor)
            else:
                gate_up.data.narrow(0, 0, 96).copy_(tensor)
    assert at.tensors(qkv) == ["q", "k", "v"]
    assert at.share(qkv) == 1.0
    assert at.tensors(gate_up) == ["gate"]
    assert at.share(gate_up) == 0.5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_slice_is_followed_by_rows_and_by_columns(rank: int, bench: BenchMaker) -> None:
    at = bench(column=random_bytes(64, HIDDEN), row=random_bytes(64, 2 * HIDDEN))
    column = torch.empty(32, HIDDEN, dtype=torch.bfloat16)
    row = torch.empty(64, HIDDEN, dtype=torch.bfloat16)
    with at.tracer:
        for name, tensor in at.weights():
            if name == "column":
                column.copy_(tensor.narrow(0, rank * 32, 32))
            else:
                row.copy_(tensor.narrow(1, rank * HIDDEN, HIDDEN))
    assert [(span.at, span.end - span.start) for span in at.spans(column)] == [(rank * 32 * 512, 32 * 512)]
    assert at.share(column) == 1.0
    assert [(span.at, span.end - span.start) for span in at.spans(row)] == [
        (line * 1024 + rank * 512, 512) for line in range(64)
    ]
    assert at.share(row) == 1.0


def test_a_transpose_by_view_keeps_the_bytes_and_a_transposed_copy_is_in_small_pieces(bench: BenchMaker) -> None:
    at = bench(w=random_bytes(64, HIDDEN))
    parameter = torch.empty(64, HIDDEN, dtype=torch.bfloat16)
    with at.tracer:
        for _, tensor in at.weights():
            parameter.copy_(tensor)
        view = parameter.t()
        same = view.t().contiguous()
        packed = view.contiguous()
    assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    assert at.share(view) == 1.0
    assert at.share(same) == 1.0
    assert at.tensors(packed) == [TOO_SMALL]


def test_clones_concatenations_and_other_whole_moves_are_followed(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(8, HIDDEN), b=random_bytes(8, HIDDEN))
    with at.tracer:
        a, b = (tensor for _, tensor in at.weights())
        moved = {
            "clone": a.clone(),
            "cat": torch.cat([a, b, torch.empty(0, dtype=torch.bfloat16)]),
            "cat.out": torch.cat([a, b], out=torch.empty(16, HIDDEN, dtype=torch.bfloat16)),
            "stack": torch.stack([a, b]),
            "index_select": torch.index_select(a, 0, torch.tensor([7, 0, 3])),
            "split": torch.split_with_sizes_copy(a, [3, 5])[1],
            "view": a.view(torch.uint8).clone(),
            "unsafe_view": torch.ops.aten._unsafe_view(a, [16, HIDDEN // 2]),
            "foreach": torch.empty(8, HIDDEN, dtype=torch.bfloat16),
            "broadcast": torch.empty(3, 8, HIDDEN, dtype=torch.bfloat16),
        }
        torch._foreach_copy_([moved["foreach"]], [b])
        moved["broadcast"].copy_(b)
    assert {name: at.share(tensor) for name, tensor in moved.items()} == dict.fromkeys(moved, 1.0)
    assert at.tensors(moved["cat"]) == ["a", "b"]
    assert at.tensors(moved["stack"]) == ["a", "b"]
    assert [span.at // 512 for span in at.spans(moved["index_select"])] == [7, 0, 3]
    assert at.tensors(moved["broadcast"]) == ["b", "b", "b"]


def test_padding_is_followed_around_the_bytes(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(8, HIDDEN))
    with at.tracer:
        ((_, a),) = at.weights()
        padded = torch.nn.functional.pad(a, (0, 0, 2, 4))
    assert at.tensors(padded) == ["computed by aten.constant_pad_nd", "a", "computed by aten.constant_pad_nd"]
    assert at.share(padded) == 8 / 14


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.to(torch.float32), "cast from bfloat16 to float32"),
        (lambda t: torch.empty(t.shape, dtype=torch.float16).copy_(t), "cast from bfloat16 to float16"),
        (lambda t: torch.cat([t, t.float()]), "cast from bfloat16 to float32"),
        (lambda t: t * 2, "computed by aten.mul"),
        (lambda t: t.clone().mul_(2), "computed by aten.mul_"),
        (lambda t: t.clone().zero_(), "computed by aten.zero_"),
        (lambda t: torch.add(t, t, out=torch.empty_like(t)), "computed by aten.add"),
        (lambda t: torch.flip(t, [0]), "computed by aten.flip"),
    ],
)
def test_what_changes_bytes_forgets_them(
    change: Callable[[torch.Tensor], torch.Tensor], reason: str, bench: BenchMaker
) -> None:
    at = bench(a=random_bytes(8, HIDDEN))
    with at.tracer:
        ((_, a),) = at.weights()
        changed = change(a)
    assert reason in at.tensors(changed)
    assert "a" not in at.tensors(changed) or changed.dtype != torch.bfloat16
    at.share(changed)


def test_an_in_place_change_of_some_rows_forgets_those_rows(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(8, HIDDEN))
    with at.tracer:
        ((_, a),) = at.weights()
        parameter = a.clone()
        parameter[2:4].add_(1)
    assert at.tensors(parameter) == ["a", "computed by aten.add_", "a"]
    assert at.share(parameter) == 0.75


def test_new_memory_at_an_old_address_is_not_what_lay_there(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(8, HIDDEN))
    with at.tracer:
        ((_, a),) = at.weights()
        storage = a.untyped_storage()
        fresh = torch.empty(0, dtype=torch.bfloat16).set_(storage)
        assert at.share(a) == 1.0  # another object over the same memory changes nothing
        at.tracer._forget(fresh)
    assert at.spans(a) == []


def test_tied_weights_are_one_memory(bench: BenchMaker) -> None:
    at = bench(embed=random_bytes(64, HIDDEN))
    embed = torch.nn.Parameter(torch.empty(64, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
    head = torch.nn.Linear(HIDDEN, 64, bias=False, dtype=torch.bfloat16)
    head.weight = embed
    with at.tracer:
        for _, tensor in at.weights():
            embed.data.copy_(tensor)
    assert at.tensors(head.weight) == ["embed"]


def test_fp8_of_one_scale_is_kept_and_requantised_is_not(bench: BenchMaker) -> None:
    fp8 = torch.float8_e4m3fn
    at = bench(
        weight=random_bytes(64, 512, dtype=fp8),
        weight_scale=torch.tensor(0.5),
        q=random_bytes(64, 512, dtype=fp8),
        k=random_bytes(64, 512, dtype=fp8),
    )
    plain = torch.empty(64, 512, dtype=fp8)
    scale = torch.empty(1)
    fused = torch.empty(128, 512, dtype=fp8)
    with at.tracer:
        for name, tensor in at.weights():
            match name:
                case "weight":
                    plain.copy_(tensor)
                case "weight_scale":
                    scale.copy_(tensor.reshape(1))
                case "q":
                    fused[:64].copy_(tensor)
                case _:
                    fused[64:].copy_(tensor)
        column_major = plain.t()
        before = at.share(fused)
        for half, own in ((fused[:64], 0.5), (fused[64:], 0.25)):  # several scales become the largest of them
            half.copy_((half.float() * own / 0.5).to(fp8))
    assert at.share(column_major) == 1.0
    assert at.share(scale) == 1.0
    assert before == 1.0
    assert at.share(fused) == 0.0
    assert at.tensors(fused) == ["cast from float32 to float8_e4m3fn"]


def test_a_copy_that_writes_a_place_several_times_is_nobodys(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(2, HIDDEN))
    with at.tracer:
        ((_, a),) = at.weights()
        target = torch.empty(2, HIDDEN, dtype=torch.bfloat16)
        target.as_strided((2, HIDDEN), (HIDDEN // 2, 1)).copy_(a)
    assert at.tensors(target) == [REPEATED]


def test_a_loaded_view_with_gaps_is_not_taken_for_the_tensor(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(8, HIDDEN))
    gappy = torch.empty(8, 2 * HIDDEN, dtype=torch.bfloat16)[:, :HIDDEN]
    at.tracer.loaded(gappy, Stored(tensor="a", file="model.safetensors", offset=0, size=8 * 512))
    assert set(at.tensors(gappy)) == {NOT_DENSE}


def test_a_number_taken_to_the_host_is_noted_with_its_tensor(bench: BenchMaker) -> None:
    at = bench(weight=random_bytes(8, HIDDEN), k_scale=torch.tensor(0.25))
    with at.tracer:
        loaded = dict(at.weights())
        scale = loaded["k_scale"].clone()
        assert float(scale) == 0.25
        assert torch.tensor(3.0).item() == 3.0
    assert at.tracer.host_reads == ("k_scale",)


def test_a_number_copied_into_a_tensor_is_nobodys(bench: BenchMaker) -> None:
    """vLLM's key and value scales are set so; torch gives the operator the number itself."""
    at = bench(a=random_bytes(4, HIDDEN))
    for tracer in (at.tracer, Tracer(follow=True, unread=True)):
        at.tracer = tracer
        with tracer:
            ((_, a),) = at.weights()
            target = a.clone()
            target[2].copy_(1.5)
        assert target[2].tolist() == [1.5] * HIDDEN
        assert at.share(target) == 0.75
        assert at.tensors(target) == ["a", "computed by aten.copy_", "a"]


READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "asarray": np.asarray,
    "of another device": lambda tensor: tensor.to("cpu", copy=True).tolist(),
    "a view": lambda tensor: tensor[2:5].numpy(),
    "equal": lambda tensor: torch.equal(torch.zeros(8), tensor),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_hands_numbers_to_the_host_is_noted_where_it_is_to_be_followed(reader: str, bench: BenchMaker) -> None:
    at = bench(scale=torch.arange(8.0), other=torch.zeros(8))
    at.tracer = Tracer(follow=True)
    with at.tracer:
        loaded = dict(at.weights())
        with at.tracer:
            READERS[reader](loaded["scale"] * 2)
        READERS[reader](torch.ones(8))
    assert at.tracer.host_reads == ("scale",)
    loaded["other"].tolist()
    assert at.tracer.host_reads == ("scale",), "it is closed"


def test_outside_the_tracer_nothing_is_seen_and_it_can_be_opened_again(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(8, HIDDEN))
    with at.tracer:
        ((_, a),) = at.weights()
    unseen = a.clone()
    with at.tracer:
        seen = a.clone()
    assert at.share(unseen) == 0.0
    assert at.share(seen) == 1.0


def test_the_storages_of_a_model_are_each_counted_once_whoever_holds_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("cache", torch.zeros(16))
    model.register_buffer("part", model.cache[4:8])
    model[1].attribute = torch.zeros(2, dtype=torch.uint8)
    model[1].empty = torch.zeros(0)
    held = [model[0].weight, model.cache, model[1].attribute]
    expected = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in held]
    assert storages_of(model) == tuple(sorted(expected))


def observed(at: Bench, tensors: list[torch.Tensor], allocation: Allocation) -> Observation:
    observer = Observer()
    storages = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
    account(at.tracer.provenance, observer, allocations=[allocation], storages=storages)
    return observer.observation([allocation])


def test_the_account_covers_every_byte_of_an_allocation_once(bench: BenchMaker) -> None:
    at = bench(a=random_bytes(8, HIDDEN), b=random_bytes(4, HIDDEN))
    arena = torch.empty(8 * PAGE_BYTES, dtype=torch.uint8)
    start = -arena.data_ptr() % PAGE_BYTES
    allocation = Allocation(ptr=arena.data_ptr() + start, size=6 * PAGE_BYTES, tag="weights")

    def place(at_byte: int, *shape: int) -> torch.Tensor:
        count = 2 * torch.Size(shape).numel()
        own = torch.frombuffer((ctypes.c_char * count).from_address(allocation.ptr + at_byte), dtype=torch.bfloat16)
        return own.reshape(shape)

    first, second, third = place(512, 8, HIDDEN), place(4864, 8, HIDDEN), place(12288, 4, HIDDEN)
    with at.tracer:
        loaded = dict(at.weights())
        first.copy_(loaded["a"])
        second[:4].copy_(loaded["b"])
        second[4:6].fill_(1)
        stale = place(20480, 8, HIDDEN)
        stale.copy_(loaded["a"])
        third.copy_(loaded["b"] * 2)
    observation = observed(at, [first, second, third, second[2:], loaded["a"]], allocation)
    found = [(one.range.ptr - allocation.ptr, one.range.size) for one in observation.extents]
    assert found == [(512, 4096), (4864, 2048)]
    residual = [(0, 512), (4608, 256), (6912, 2048), (8960, 3328), (12288, 2048), (14336, 10240)]
    assert reason_bytes([(allocation.ptr + ptr, size) for ptr, size in residual], observation.labels) == {
        BETWEEN: 512 + 256 + 3328 + 10240,
        "computed by aten.fill_": 1024,
        UNWRITTEN: 1024,
        "computed by aten.mul": 2048,
    }


def test_a_name_in_two_files_or_with_another_shape_or_type_is_no_source(tmp_path: Path) -> None:
    save_file({"a": random_bytes(2, 2), "twice": random_bytes(2, 2)}, tmp_path / "one.safetensors")
    save_file({"twice": random_bytes(2, 2)}, tmp_path / "two.safetensors")
    sources = Sources([read_header(tmp_path / name) for name in ("one.safetensors", "two.safetensors")])
    assert sources.ambiguous == ("twice",)
    found = sources.find("a", "torch.bfloat16", (2, 2))
    assert found is not None
    assert (found.tensor, found.file, found.size) == ("a", "one.safetensors", 8)
    assert sources.find("twice", "torch.bfloat16", (2, 2)) is None
    assert sources.find("a", "torch.float16", (2, 2)) is None
    assert sources.find("a", "torch.bfloat16", (4,)) is None
    assert sources.find("b", "torch.bfloat16", (2, 2)) is None
