"""Modules whose weights move into stable memory: the same numbers, the same sharing, and the same memory afterwards."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coldsnap.core.extents import PAGE_BYTES
from coldsnap.engines.vllm.hostpool import HostPool
from coldsnap.engines.vllm.provenance import Span, Stored
from coldsnap.engines.vllm.tracing import Tracer
from coldsnap.errors import EngineError, UsageError
from coldsnap.hydrate import ProvedSource, Segment, StableMemory, hydrate_file, libc
from coldsnap.testing.memory_suite import StableMemoryContract

pytestmark = pytest.mark.model

MIB = 1 << 20
UNSEEN = contextlib.nullcontext()


class TestHostPool(StableMemoryContract):
    def make_memory(self, base: int) -> StableMemory:
        return HostPool(base=base)

    @contextlib.contextmanager
    def occupy(self, memory: StableMemory, ptr: int, size: int) -> Iterator[None]:
        libc.unmap(ptr, size)
        libc.map_anonymous(ptr, size, writable=True, replace=False)
        yield
        libc.unmap(ptr, size)


class Layer(torch.nn.Module):  # type: ignore[misc] # torch is not type-checked here
    """Shaped like vLLM's: fused weights, a transposed view, a buffer, and nothing that wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.rand(96, 64, dtype=torch.bfloat16), requires_grad=False)
        self.down = torch.nn.Parameter(torch.rand(64, 32).t(), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.rand(()), requires_grad=False)
        self.register_buffer("cache", torch.rand(256, 8))
        self.register_buffer("nothing", torch.empty(0))


class Model(torch.nn.Module):  # type: ignore[misc] # nor here
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.rand(512, 64), requires_grad=False)
        self.head = self.embed
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.register_buffer("halves", torch.arange(4096, dtype=torch.int64)[1024:])
        self.register_buffer("low", self.halves[:8].view(torch.int32)[1:5])


class Copies(TorchDispatchMode):  # type: ignore[misc] # nor here
    """Every copy that was seen, as (destination, source, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.seen.append((args[0].data_ptr(), args[1].data_ptr(), args[0].numel() * args[0].element_size()))
        return func(*args, **(kwargs or {}))


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor for name, tensor in found if tensor.numel()}


@pytest.fixture
def pool() -> Iterator[HostPool]:
    with HostPool() as memory:
        yield memory


def inside(pool: HostPool, tensor: torch.Tensor) -> bool:
    return any(one.ptr <= tensor.data_ptr() < one.ptr + one.size for one in pool.allocations)


def test_tensors_keep_what_they_are_and_lie_in_the_pool(pool: HostPool) -> None:
    model = Model()
    objects = tensors_of(model)
    before = {name: (t.clone(), t.dtype, t.size(), t.stride(), type(t)) for name, t in objects.items()}
    pool.prepare(model, UNSEEN)
    for name, tensor in tensors_of(model).items():
        values, *facts = before[name]
        assert tensor is objects[name]
        assert [tensor.dtype, tensor.size(), tensor.stride(), type(tensor)] == facts
        assert torch.equal(tensor, values)
        assert inside(pool, tensor)
    assert model.head.data_ptr() == model.embed.data_ptr()
    assert model.layers[0].down.t().is_contiguous()


class LoadedParameter(torch.nn.Parameter):  # type: ignore[misc] # torch is not type-checked here
    """Knows how it is loaded, as vLLM's parameters do, and lets no function of torch make another of its kind."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    loader = "rows"


def test_a_parameter_of_another_class_stays_what_it_is(pool: HostPool) -> None:
    model = torch.nn.Module()
    model.weight = LoadedParameter(torch.rand(40, 50), requires_grad=False)
    model.weight.output_dim = 1
    same, values = model.weight, model.weight.clone()
    pool.prepare(model, UNSEEN)
    assert model.weight is same
    assert (type(same), same.loader, same.output_dim) == (LoadedParameter, "rows", 1)
    assert inside(pool, same)
    assert torch.equal(same, values)


def test_tensors_that_share_bytes_still_do(pool: HostPool) -> None:
    model = Model()
    apart = model.low.data_ptr() - model.halves.data_ptr()
    pool.prepare(model, UNSEEN)
    assert model.low.data_ptr() - model.halves.data_ptr() == apart
    model.halves[1] = 77
    assert model.low[1] == 77


def test_each_storage_is_one_of_its_own_and_no_larger_than_what_is_used(pool: HostPool) -> None:
    model = Model()
    pool.prepare(model, UNSEEN)
    storages = {name: t.untyped_storage() for name, t in tensors_of(model).items()}
    assert len({s.data_ptr() for s in storages.values()}) == 2 + 2 * 4  # embed and head, halves and low; each layer's
    assert storages["halves"].nbytes() == 3072 * 8
    assert all(s.data_ptr() % 64 == 0 for s in storages.values())
    assert storages["embed"].data_ptr() % PAGE_BYTES == 0


def test_copies_are_made_where_the_tracer_looks(pool: HostPool) -> None:
    model = Model()
    places = {name: (t.data_ptr(), t.numel() * t.element_size()) for name, t in tensors_of(model).items()}
    copies = Copies()
    pool.prepare(model, copies)
    for name, tensor in tensors_of(model).items():
        was, size = places[name]
        covering = [
            (to, source)
            for to, source, count in copies.seen
            if source <= was and was + size <= source + count and to - source == tensor.data_ptr() - was
        ]
        assert len(covering) == 1, name
    pool.settle(model, copies)
    assert len(copies.seen) == 2 + 2 * 4


def test_what_is_known_of_bytes_goes_along(pool: HostPool) -> None:
    """A loader writes half of a fused weight, and a finalizer makes a copy of it of its own."""
    model = Model()
    tracer = Tracer()
    with tracer:
        pool.prepare(model, tracer)
        qkv = model.layers[0].qkv
        read = torch.rand(48, 64, dtype=torch.bfloat16)
        tracer.loaded(read, Stored(file="model.safetensors", tensor="qkv", offset=800, size=48 * 64 * 2))
        qkv.narrow(0, 48, 48).copy_(read)
        assert stored_in(tracer, qkv) == [(48 * 64 * 2, 800, 48 * 64 * 2)]
        model.layers[0].qkv = torch.nn.Parameter(qkv.clone(), requires_grad=False)
    assert not inside(pool, model.layers[0].qkv)
    pool.settle(model, tracer)
    assert inside(pool, model.layers[0].qkv)
    assert stored_in(tracer, model.layers[0].qkv) == [(48 * 64 * 2, 800, 48 * 64 * 2)]
    assert torch.equal(model.layers[0].qkv[48:], read)


def stored_in(tracer: Tracer, tensor: torch.Tensor) -> list[tuple[int, int, int]]:
    """What of a tensor's storage is the checkpoint's: (where in it, file offset, bytes)."""
    storage = tensor.untyped_storage()
    spans: list[Span] = list(tracer.provenance.within(storage.data_ptr(), storage.nbytes()))
    return [
        (one.start - storage.data_ptr(), one.what.offset + one.at, one.end - one.start)
        for one in spans
        if isinstance(one.what, Stored)
    ]


def test_what_finalizers_made_is_moved_and_the_rest_stays(pool: HostPool) -> None:
    model = Model()
    pool.prepare(model, UNSEEN)
    (first,) = pool.allocations
    kept = model.embed.data_ptr()
    made = torch.rand(64, 96)
    model.layers[1].qkv = torch.nn.Parameter(made.clone(), requires_grad=False)
    pool.settle(model, UNSEEN)
    assert model.embed.data_ptr() == kept
    second = next(one for one in pool.allocations if one != first)
    assert second.ptr <= model.layers[1].qkv.data_ptr() < second.ptr + second.size
    assert torch.equal(model.layers[1].qkv, made)
    pool.settle(model, UNSEEN)
    assert len(pool.allocations) == 2


def test_a_tag_is_the_layout_and_not_the_values() -> None:
    tags = []
    for change in (None, None, "cache"):
        model = Model()
        if change:
            model.layers[0].register_buffer(change, torch.rand(256, 9))
        with HostPool() as memory:
            memory.prepare(model, UNSEEN)
            tags += [one.tag for one in memory.allocations]
    assert tags[0] == tags[1] != tags[2]


def test_a_model_computes_the_same_after_a_night(pool: HostPool, tmp_path: Path) -> None:
    model = Model()
    inputs = torch.rand(3, 64)
    expected = inputs @ model.embed.t()
    pool.prepare(model, UNSEEN)
    saved = [(one, pool.view(one.ptr, one.size).tobytes()) for one in pool.allocations]
    path = tmp_path / "bytes"
    path.write_bytes(b"".join(data for _, data in saved))
    pool.unmap()
    pool.remap()
    assert not torch.any(model.embed)
    with path.open("rb") as file:
        offset, segments = 0, []
        for one, data in saved:
            segments.append(Segment(file_offset=offset, ptr=one.ptr, size=len(data)))
            offset += len(data)
        hydrate_file(ProvedSource(fd=file.fileno(), bytes=offset, evidence="test"), segments, pool)
    assert torch.equal(inputs @ model.embed.t(), expected)


def test_tensors_of_another_device_are_refused_by_name(pool: HostPool) -> None:
    model = Model()
    model.layers[1].qkv = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    with pytest.raises(EngineError, match=r"layers\.1\.qkv .* on meta"):
        pool.prepare(model, UNSEEN)
    assert pool.allocations == ()


def test_nothing_moves_into_unmapped_memory(pool: HostPool) -> None:
    pool.prepare(Model(), UNSEEN)
    pool.unmap()
    with pytest.raises(UsageError, match="unmapped"):
        pool.settle(Model(), UNSEEN)


def resident_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor of whole pages the kernel has pages for."""
    start = tensor.data_ptr()
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(start // PAGE_BYTES * 8)
        entries = pages.read(tensor.numel() // PAGE_BYTES * 8)
    present = [int.from_bytes(entries[at : at + 8], "little") >> 63 for at in range(0, len(entries), 8)]
    return sum(present) * PAGE_BYTES


def test_keys_and_values_are_forgotten_and_stay_where_they_are() -> None:
    flat = torch.empty(8 * MIB + 3 * PAGE_BYTES + 40, dtype=torch.uint8)
    flat.fill_(7)
    cache = [flat[: 4 * MIB].view(torch.float16), flat[4 * MIB :]]
    places = [one.data_ptr() for one in cache]
    middle = flat[2 * MIB : 6 * MIB]  # in no huge page with what stays
    assert resident_bytes(middle) > 0
    with HostPool(cache=lambda: cache) as memory:
        given_back = memory.discard_kv()
        assert 8 * MIB <= given_back <= flat.numel()
        assert given_back % PAGE_BYTES == 0
        assert resident_bytes(middle) == 0
        memory.restore_kv()
        assert [one.data_ptr() for one in cache] == places
        assert not torch.any(flat)
        cache[0].fill_(1)
        assert memory.leftovers() == ()


@pytest.mark.parametrize("size", [24, PAGE_BYTES - 8, 3 * PAGE_BYTES])
def test_small_caches_are_zero_and_their_neighbours_are_not(size: int) -> None:
    around = bytearray(b"\x05" * (size + 2 * 64))
    cache = torch.frombuffer(memoryview(around)[64 : 64 + size], dtype=torch.uint8)
    with HostPool(cache=lambda: [cache]) as memory:
        memory.discard_kv()
    assert around == b"\x05" * 64 + bytes(size) + b"\x05" * 64


def test_a_cache_in_a_shared_file_is_zeroed_by_hand(tmp_path: Path) -> None:
    """Discarded pages of a file come back with the file's bytes."""
    path = tmp_path / "shared"
    path.write_bytes(os.urandom(4 * PAGE_BYTES))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        held = [torch.frombuffer(mapped, dtype=torch.uint8)]
        with HostPool(cache=lambda: held) as memory:
            assert memory.discard_kv() == 0
        assert not torch.any(held[0])
        assert path.read_bytes() == bytes(4 * PAGE_BYTES)
        held.clear()
