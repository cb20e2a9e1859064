"""A model that is built without a byte of its checkpoint, with plain torch: laid out as if loaded, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coldsnap.core.extents import Allocation
from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import ExportBody, Exported, PackSource, Request, Verb, WakeBody
from coldsnap.engines.control import Call
from coldsnap.engines.export import export_memory
from coldsnap.engines.local_model import checkpoint_files, resolve_local
from coldsnap.engines.observer import Observation, Observer
from coldsnap.engines.relocation import Relocation
from coldsnap.engines.vllm.account import account
from coldsnap.engines.vllm.hostpool import HostPool
from coldsnap.engines.vllm.sources import Sources
from coldsnap.engines.vllm.storages import storages_of
from coldsnap.engines.vllm.templates import template_problems
from coldsnap.engines.vllm.tracing import Tracer
from coldsnap.engines.vllm.unread import unread_tensors
from coldsnap.engines.wake import fill_memory
from coldsnap.errors import Refused, UserError
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.checkpoint import write_safetensors

pytestmark = pytest.mark.model

HIDDEN, ROWS = 256, 64
BF16 = torch.bfloat16
BASES = (0x5200_0000_0000, 0x5300_0000_0000)


class Model(torch.nn.Module):  # type: ignore[misc] # torch is not type-checked here
    """As much of a model of vLLM's as matters: fused and sliced weights, a cast, a cache, and finalizers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(2 * ROWS, HIDDEN, dtype=BF16), requires_grad=False)
        self.down = torch.nn.Parameter(torch.zeros(HIDDEN, ROWS, dtype=BF16), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
        self.register_buffer("cache", torch.arange(512, dtype=torch.float32))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name in ("gate", "up"):
            self.gate_up.data.narrow(0, ROWS * ("gate", "up").index(name), ROWS).copy_(tensor)
        elif name == "down":
            self.down.data.copy_(tensor.narrow(1, ROWS, ROWS))
        else:
            self.norm.data.copy_(tensor)

    def finalize(self) -> None:
        self.down = torch.nn.Parameter(self.down.data.clone().add_(1), requires_grad=False)


Finalize = Callable[[Model], None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    shapes = {"gate": (ROWS, HIDDEN), "up": (ROWS, HIDDEN), "down": (HIDDEN, 2 * ROWS), "norm": (HIDDEN,)}
    tensors = {name: torch.randn(shape, generator=generator).to(BF16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


class Made:
    """A model, its memory, and what the observer was told."""

    def __init__(self, checkpoint: Path, *, read: bool, base: int, finalize: Finalize = Model.finalize) -> None:
        self.files = checkpoint_files(checkpoint)
        self.model = Model()
        self.memory = HostPool(base=base)
        self.tracer = Tracer(follow=True, unread=not read)
        self.observer = Observer()
        self.told: list[tuple[str, bool]] = []
        sources = Sources(self.files)
        with self.tracer, torch.no_grad():
            self.memory.prepare(self.model, self.tracer)
            for name, tensor in self._tensors(checkpoint, read=read):
                stored = sources.find(name, str(tensor.dtype), tensor.shape)
                self.told.append((name, stored is not None))
                if stored is not None:
                    self.tracer.loaded(tensor, stored)
                self.model.load(name, tensor)
            finalize(self.model)
            self.memory.settle(self.model, self.tracer)
        storages = storages_of(self.model)
        account(self.tracer.provenance, self.observer, allocations=self.memory.allocations, storages=storages)

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        return self.memory.allocations

    @property
    def observation(self) -> Observation:
        return self.observer.observation(self.allocations)

    def problems(self) -> list[tuple[str, str]]:
        found = template_problems(
            files=self.files,
            told=self.told,
            host_reads=self.tracer.host_reads,
            allocations=self.allocations,
            storages=storages_of(self.model),
            made_from=self.tracer.made_from,
        )
        assert all(one.cure for one in found)
        return [(one.field, one.message) for one in found]

    def layout(self) -> list[object]:
        """Allocations, extents and their copies, by offsets."""
        starts = [one.ptr for one in self.allocations]

        def offset(ptr: int) -> tuple[int, int]:
            number = max(index for index, start in enumerate(starts) if start <= ptr)
            return number, ptr - starts[number]

        rows: list[object] = [(one.size, one.tag) for one in self.allocations]
        for extent in self.observation.extents:
            writes = [(offset(w.ptr), w.size, w.tensor, w.file, w.file_offset, w.tensor_offset) for w in extent.writes]
            rows.append((offset(extent.range.ptr), extent.range.size, extent.range.semantic_id, writes))
        rows += sorted((offset(label.ptr), label.size, label.reason) for label in self.observation.labels)
        return rows

    def release(self) -> None:
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self.memory.release()

    def _tensors(self, checkpoint: Path, *, read: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if read:
            yield from load_file(checkpoint / "model.safetensors").items()
        else:
            yield from unread_tensors(self.files)


Make = Callable[..., Made]


@pytest.fixture
def make(checkpoint: Path) -> Iterator[Make]:
    made: list[Made] = []

    def one(*, read: bool, finalize: Finalize = Model.finalize) -> Made:
        made.append(Made(checkpoint, read=read, base=BASES[len(made)], finalize=finalize))
        return made[-1]

    yield one
    for each in made:
        each.release()


def test_a_build_reads_nothing_and_lays_out_what_a_load_does(make: Make, checkpoint: Path) -> None:
    loaded = make(read=True)
    (checkpoint / "model.safetensors").chmod(0o600)
    built = make(read=False)
    assert built.layout() == loaded.layout()
    assert built.problems() == loaded.problems() == []
    assert {w.tensor for extent in built.observation.extents for w in extent.writes} == {"gate", "up"}
    with torch.no_grad():
        assert not built.model.gate_up.any(), "not a byte was there"
        assert loaded.model.gate_up.any()


def test_no_page_of_an_unread_tensor_is_there(checkpoint: Path) -> None:
    """Its copies are left out, so nobody touches what would be zero: the kernel has no page for it."""
    tensors = dict(unread_tensors(checkpoint_files(checkpoint)))
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (tuple(t.shape), t.dtype) for name, t in load_file(checkpoint / "model.safetensors").items()
    }
    there = {tensor.data_ptr(): tensor for tensor in tensors.values()}
    assert len(there) == len(tensors)
    resident = {}
    for block in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        line = next(row for row in block.splitlines() if "-" in row.split(" ")[0] and ":" not in row.split(" ")[0])
        start = int(line.split("-")[0], 16)
        resident[start] = next(int(row.split()[1]) for row in block.splitlines() if row.startswith("Rss:"))
    for ptr in there:
        start = max(one for one in resident if one <= ptr)
        assert resident[start] == 0


def test_a_pack_of_a_loaded_model_fills_a_built_one(make: Make, checkpoint: Path, tmp_path: Path) -> None:
    loaded = make(read=True)
    source, exported = exported_from(loaded, checkpoint, tmp_path)
    numbers = {name: tensor.clone() for name, tensor in named(loaded.model)}
    built = make(read=False)
    for way in (PackSource.NATIVE, PackSource.RECOVERY):
        wake(built, exported, source, checkpoint, way)
        for name, tensor in named(built.model):
            assert torch.equal(tensor, numbers[name]), (way, name)
        built.memory.unmap()
        built.memory.remap()


def test_another_layout_is_refused(make: Make, checkpoint: Path, tmp_path: Path) -> None:
    """A finalizer that went another way on this host: one tensor is somewhere else."""

    def otherwise(model: Model) -> None:
        model.gate_up = torch.nn.Parameter(torch.cat([model.gate_up.data, model.gate_up.data]), requires_grad=False)
        Model.finalize(model)

    source, exported = exported_from(make(read=True), checkpoint, tmp_path)
    drifted = make(read=False, finalize=otherwise)
    with pytest.raises(Refused, match="the model that was built here has"):
        wake(drifted, exported, source, checkpoint, PackSource.NATIVE)


def test_a_number_that_decides_something_is_refused_by_its_tensor(make: Make) -> None:
    def scaled(model: Model) -> None:
        model.factor = float(model.norm.data[3])
        model.largest = model.gate_up.data.max().item()
        Model.finalize(model)

    assert make(read=True, finalize=scaled).problems() == [
        ("checkpoint[norm]", "decides something while the model is loaded: a number of it was read"),
        ("checkpoint[gate]", "decides something while the model is loaded: a number of it was read"),
    ]


def test_numbers_of_the_model_s_own_decide_freely(make: Make) -> None:
    def own(model: Model) -> None:
        model.factor = model.cache[7].item()
        Model.finalize(model)

    assert make(read=True, finalize=own).problems() == []


def test_what_is_made_of_a_weight_outside_the_weights_is_refused(make: Make) -> None:
    def kept(model: Model) -> None:
        model.plain = model.norm.data * 2
        model.harmless = torch.ones(8) * 2
        Model.finalize(model)

    assert make(read=True, finalize=kept).problems() == [
        ("checkpoint[norm]", f"is also made into {HIDDEN * 4} bytes that are not among the weights")
    ]


def test_tensors_that_are_in_no_header_or_not_loaded_are_refused(make: Make) -> None:
    made = make(read=True)
    made.told.remove(("up", True))
    made.told += [("draft", False), ("gate", True)]
    assert made.problems() == [
        ("checkpoint[draft]", "is not in one header with this shape and number type"),
        ("checkpoint[gate]", "was loaded more than once"),
        ("checkpoint[up]", "is in a header, and was not loaded"),
    ]


def test_a_number_type_that_torch_has_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"w": bytes(32)})
    text = path.read_bytes().replace(b'"U8"', b'"F4"').replace(b"[32], ", b"[64], ")
    path.write_bytes(text)
    files = checkpoint_files(tmp_path)
    found = template_problems(
        files=files, told=[("w", True)], host_reads=(), allocations=(), storages=(), made_from=lambda *_: None
    )
    assert [one.message for one in found] == ["is of number type F4, which torch has not"]
    with pytest.raises(UserError, match="F4"):
        list(unread_tensors(files))


def named(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def exported_from(made: Made, checkpoint: Path, folder: Path) -> tuple[ModelSource, Exported]:
    pinned = resolve_local(checkpoint)
    source = ModelSource(model_id=pinned.id, revision=pinned.revision, metadata_sha256=pinned.metadata_sha256)
    state, out = folder / "state", folder / "out"
    StateRoot.open(state)
    out.mkdir(mode=0o700)
    exported = export_memory(
        ExportBody(state_root=str(state), out_dir=str(out), capture_id="c" * 32),
        memory=made.memory,
        observation=made.observation,
        source=source,
        model_path=checkpoint,
        worker="w0",
        rank=0,
        call=Call(Request(id=1, verb=Verb.EXPORT), lambda _frame: None),
    )
    return source, exported


def wake(made: Made, exported: Exported, source: ModelSource, checkpoint: Path, way: PackSource) -> None:
    assert exported.pack is not None
    assert exported.residual is not None
    body = WakeBody(
        source=way,
        native_manifest=exported.native_manifest.path,
        recovery_manifest=exported.recovery_manifest.path,
        pack=exported.pack.path,
        pack_sha256=exported.pack.sha256,
        pack_bytes=exported.pack.bytes,
        residual=exported.residual.path,
        residual_sha256=exported.residual.sha256,
        model_path=str(checkpoint),
    )
    ranges = tuple(one.range for one in made.observation.extents)
    relocation = Relocation(allocations=made.allocations, ranges=ranges)
    call = Call(Request(id=1, verb=Verb.WAKE), lambda _frame: None)
    fill_memory(body, memory=made.memory, call=call, started_with=source, relocation=relocation)
