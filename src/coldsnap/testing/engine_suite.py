"""The contract of an engine, as tests. A subclass says how to make the engine; pytest runs the rest.

    class TestMine(EngineContract):
        def make(self, variant: int) -> EngineWorker: ...

`make(0)` and `make(1)` are the same model loaded in another order to another address.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.manifest import NativeManifest, native_manifest_bytes, parse_native_manifest, parse_recovery_manifest
from coldsnap.core.messages import MaterializationState, PackSource, Prompt, Serving, Verb, WorkerState
from coldsnap.core.policy import Materialize
from coldsnap.engines.observer import UNOBSERVED
from coldsnap.engines.protocol import EngineWorker
from coldsnap.errors import ColdsnapError, IntegrityError, PayloadRejected, Refused, ResourceBusy, UsageError
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.hydrate.host import HostMemory
from coldsnap.testing.engine_harness import Driven, driven, free_port, post
from coldsnap.testing.repack import repack_with_change

__all__ = ["EngineContract"]

_PROMPTS = (
    Prompt(text="The capital of France is", max_tokens=6),
    Prompt(text="one two three four", max_tokens=6),
    Prompt(text="x", max_tokens=3),
)


class EngineContract:
    """Every promise of `EngineWorker` that can be seen from outside."""

    BASES = (0x5100_0000_0000, 0x5200_0000_0000)
    """Where the memories of two workers of one process begin."""

    def make(self, variant: int) -> EngineWorker:
        """A new engine, not loaded."""
        raise NotImplementedError

    def make_memory(self, base: int) -> HostMemory | CudaMemory:
        """What its weights live in."""
        return HostMemory(base=base)

    @pytest.fixture
    def live(self, tmp_path: Path) -> Iterator[Driven]:
        """A loaded worker."""
        with self.driven(self.make(0), tmp_path / "a") as worker:
            yield worker

    def driven(self, engine: EngineWorker, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        """`engine` as the first worker of this process, loaded or as `how` says."""
        return driven(engine, folder, base=self.BASES[0], make_memory=self.make_memory, **how)

    def beside(self, variant: int, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        """The same as a second worker."""
        return driven(self.make(variant), folder, base=self.BASES[1], make_memory=self.make_memory, **how)

    def test_it_loads_into_idle_and_says_what_it_is(self, live: Driven) -> None:
        status = live.client.status()
        assert (status.state, status.worker, status.pid) == (WorkerState.IDLE, "w0", os.getpid())
        assert status.engine == live.engine.name
        assert status.engine_versions
        assert status.port is None
        assert status.mapped_bytes == sum(one.size for one in live.memory.allocations) > 0

    def test_an_answer_depends_on_the_prompt_alone(self, live: Driven) -> None:
        first = live.answers(_PROMPTS)
        assert all(1 <= len(a.token_ids) <= p.max_tokens for a, p in zip(first, _PROMPTS, strict=True))
        assert live.answers(tuple(reversed(_PROMPTS))) == tuple(reversed(first))

    def test_export_accounts_for_every_byte(self, live: Driven) -> None:
        exported = live.export()
        native = parse_native_manifest(Path(exported.native_manifest.path).read_bytes())
        recovery = parse_recovery_manifest(Path(exported.recovery_manifest.path).read_bytes())
        preserved = sum(one.size for one in live.memory.allocations)
        assert native.entries == recovery.entries == live.memory.allocations
        assert native.cover().preserved_bytes == preserved
        assert exported.model_bytes + exported.residual_bytes == preserved
        assert exported.model_bytes > exported.residual_bytes
        assert sum(exported.residual_reasons.values()) == exported.residual_bytes
        assert UNOBSERVED not in exported.residual_reasons
        assert recovery.model_source == live.engine.model_source
        assert {(e.ptr, e.size, e.sha256) for e in recovery.replay_plan} == {
            (e.ptr, e.size, e.sha256) for e in native.model_weight_extents
        }

    def test_export_changes_nothing(self, live: Driven) -> None:
        before, answers = live.contents(), live.answers(_PROMPTS)
        live.export()
        assert live.contents() == before
        assert live.answers(_PROMPTS) == answers

    def test_another_load_order_and_address_give_the_same_pack(self, live: Driven, tmp_path: Path) -> None:
        first = live.export()
        with self.beside(1, tmp_path / "b") as other:
            second = other.export()
            assert other.answers(_PROMPTS) == live.answers(_PROMPTS)
            assert other.memory.allocations != live.memory.allocations
        assert first.pack is not None
        assert second.pack is not None
        assert second.pack.sha256 == first.pack.sha256
        assert second.pack_shared

    def test_sleep_holds_nothing_and_wake_brings_the_same_answers(self, live: Driven) -> None:
        before, answers, exported = live.contents(), live.answers(_PROMPTS), live.export()
        for _ in range(2):
            report = live.sleep()
            assert report.unmapped_bytes == sum(one.size for one in live.memory.allocations)
            status = live.client.status()
            assert (status.state, status.mapped_bytes) == (WorkerState.ASLEEP, 0)
            live.wake(exported)
            assert live.client.status().state is WorkerState.IDLE
            assert live.contents() == before
            assert live.answers(_PROMPTS) == answers

    def test_recovery_brings_the_same_bytes_without_a_pack(self, live: Driven) -> None:
        before, answers, exported = live.contents(), live.answers(_PROMPTS), live.export()
        live.sleep()
        report = live.wake(exported, PackSource.RECOVERY, pack=None, pack_sha256=None, pack_bytes=None)
        assert report.model_bytes == exported.model_bytes
        assert live.contents() == before
        assert live.answers(_PROMPTS) == answers

    def test_a_pack_can_be_written_again_from_memory(self, live: Driven) -> None:
        exported = live.export()
        content = live.lose_pack(exported)
        made = live.materialize(exported)
        assert exported.pack is not None
        assert (made.pack, made.shared) == (exported.pack, False)
        assert Path(made.pack.path).read_bytes() == content
        told = live.materialization
        assert (told.state, told.pack_sha256) == (MaterializationState.DONE, exported.pack.sha256)
        assert told.done_bytes == told.total_bytes == exported.model_bytes
        assert live.materialize(exported).shared, "it is there, and is not written twice"
        live.sleep()
        live.wake(exported)

    @pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
    def test_a_wrong_byte_in_memory_writes_no_pack(self, live: Driven, where: float) -> None:
        exported = live.export()
        content = live.lose_pack(exported)
        extents = parse_native_manifest(Path(exported.native_manifest.path).read_bytes()).model_weight_extents
        victim = extents[int(where * (len(extents) - 1))]
        wrong = victim.ptr + int(where * (victim.size - 1))
        live.flip_bit(wrong)
        with pytest.raises(IntegrityError, match=f"{victim.ptr:#x}"):
            live.materialize(exported)
        told = live.materialization
        assert (told.state, live.files()) == (MaterializationState.FAILED, [])
        assert f"{victim.ptr:#x}" in told.reason
        live.flip_bit(wrong)
        assert Path(live.materialize(exported).pack.path).read_bytes() == content

    def test_a_recovery_can_write_the_pack_before_it_is_done(self, live: Driven) -> None:
        answers, exported = live.answers(_PROMPTS), live.export()
        content = live.lose_pack(exported)
        live.sleep()
        report = live.wake(exported, PackSource.RECOVERY, materialize=Materialize.REQUIRED)
        assert exported.pack is not None
        assert Path(exported.pack.path).read_bytes() == content
        assert report.materialization is not None
        assert report.materialization.state is MaterializationState.DONE
        live.sleep()
        live.wake(exported)
        assert live.answers(_PROMPTS) == answers

    def test_a_recovery_can_write_the_pack_beside_the_service(self, live: Driven) -> None:
        answers, exported = live.answers(_PROMPTS), live.export()
        content = live.lose_pack(exported)
        live.sleep()
        report = live.wake(exported, PackSource.RECOVERY, materialize=Materialize.ASYNC)
        assert report.materialization is not None
        assert report.materialization.state is MaterializationState.WAITING
        port = free_port()
        live.serve(port)
        post(port, "/v1/completions", {"prompt": "x", "max_tokens": 2, "temperature": 0})
        live.sleep()  # finishes it first, wherever it is
        assert live.materialization.state is MaterializationState.DONE
        assert [thread.name for thread in threading.enumerate() if thread.name == "coldsnap-pack"] == []
        assert exported.pack is not None
        assert Path(exported.pack.path).read_bytes() == content
        live.wake(exported)
        assert live.answers(_PROMPTS) == answers

    def test_a_recovery_writes_nothing_unless_asked(self, live: Driven) -> None:
        exported = live.export()
        live.lose_pack(exported)
        live.sleep()
        report = live.wake(exported, PackSource.RECOVERY)
        assert report.materialization is not None
        assert report.materialization.state is MaterializationState.IDLE
        live.sleep()
        assert live.files() == []

    def test_nothing_read_gives_other_answers(self, live: Driven) -> None:
        answers, exported = live.answers(_PROMPTS), live.export()
        live.sleep()
        live.wake(exported, PackSource.NONE)
        assert all(not any(data) for data in live.contents().values())
        assert live.answers(_PROMPTS) != answers

    def test_one_changed_tensor_in_a_rehashed_pack_gives_other_answers(self, live: Driven) -> None:
        answers, exported = live.answers(_PROMPTS), live.export()
        live.sleep()
        changed = repack_with_change(exported, live.folder / "changed")
        live.wake(
            exported,
            native_manifest=str(changed.native_manifest),
            pack=str(changed.pack),
            pack_sha256=changed.sha256,
            pack_bytes=changed.bytes,
        )
        assert live.answers(_PROMPTS) != answers

    def test_a_damaged_pack_is_refused_and_the_worker_can_be_woken_again(self, live: Driven) -> None:
        answers, exported = live.answers(_PROMPTS), live.export()
        assert exported.pack is not None
        live.sleep()
        damaged = live.folder / "damaged.pack"
        data = bytearray(Path(exported.pack.path).read_bytes())
        data[len(data) // 3] ^= 1
        damaged.write_bytes(data)
        damaged.chmod(0o600)
        with pytest.raises(PayloadRejected):
            live.wake(exported, pack=str(damaged))
        status = live.client.status()
        assert (status.state, status.mapped_bytes) == (WorkerState.ASLEEP, 0)
        live.wake(exported)
        assert live.answers(_PROMPTS) == answers

    def test_memory_of_another_capture_is_refused(self, live: Driven) -> None:
        exported = live.export()
        manifest = parse_native_manifest(Path(exported.native_manifest.path).read_bytes())
        moved = live.folder / "moved.json"
        moved.write_bytes(native_manifest_bytes(_moved(manifest, by=1 << 30)))
        moved.chmod(0o600)
        live.sleep()
        with pytest.raises(ColdsnapError, match="entries"):
            live.wake(exported, native_manifest=str(moved))
        assert live.client.status().state is WorkerState.ASLEEP

    def test_verbs_outside_the_table_change_nothing(self, live: Driven) -> None:
        exported = live.export()
        with pytest.raises(UsageError, match="idle"):
            live.wake(exported)
        assert live.client.status().state is WorkerState.IDLE
        live.sleep()
        for refused in (live.sleep, lambda: live.answers(_PROMPTS), lambda: live.serve(free_port())):
            with pytest.raises(UsageError, match="asleep"):
                refused()
        assert live.client.status().state is WorkerState.ASLEEP

    def test_http_gives_the_tokens_of_the_control_socket(self, live: Driven) -> None:
        port = free_port()
        live.serve(port)
        status = live.client.status()
        assert (status.state, status.port) == (WorkerState.SERVING, port)
        for prompt, answer in zip(_PROMPTS, live.answers(_PROMPTS), strict=True):
            body = {"prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0, "return_token_ids": True}
            code, reply = post(port, "/v1/completions", body)
            assert code == 200
            assert tuple(reply["choices"][0]["token_ids"]) == answer.token_ids
            assert reply["choices"][0]["text"] == answer.text

    @pytest.mark.parametrize("verb", [Verb.STOP_SERVING, Verb.SLEEP])
    def test_a_closed_listener_refuses_and_leaves_no_socket(self, live: Driven, verb: Verb) -> None:
        before = _sockets()
        port = free_port()
        live.serve(port)
        post(port, "/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 0})
        if verb is Verb.SLEEP:
            live.sleep()
        else:
            live.call(verb, None, Serving)
        with pytest.raises(ConnectionRefusedError):
            post(port, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert _sockets() == before

    def test_the_listener_opens_again_elsewhere_after_a_wake(self, live: Driven) -> None:
        exported = live.export()
        live.serve(free_port())
        live.sleep()
        live.wake(exported)
        port = free_port()
        live.serve(port)
        assert post(port, "/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 0})[0] == 200

    def test_a_taken_port_is_named_and_changes_nothing(self, live: Driven, tmp_path: Path) -> None:
        port = free_port()
        live.serve(port)
        with self.beside(1, tmp_path / "b") as other:
            with pytest.raises(ResourceBusy, match=str(port)):
                other.serve(port)
            assert other.client.status().state is WorkerState.IDLE

    def test_a_port_in_the_settings_serves_at_once(self, tmp_path: Path) -> None:
        port = free_port()
        with self.driven(self.make(0), tmp_path / "a", port=port) as worker:
            assert worker.client.status().state is WorkerState.SERVING
            assert post(port, "/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 0})[0] == 200

    def test_a_damaged_checkpoint_fails_the_load_and_says_why(self, tmp_path: Path) -> None:
        engine = self.make_damaged(tmp_path / "broken")
        with pytest.raises(ColdsnapError), self.driven(engine, tmp_path / "a"):
            pytest.fail("it loaded")

    def test_a_template_has_imported_everything_and_holds_no_model(self, tmp_path: Path) -> None:
        with self.beside(0, tmp_path / "t", template=True) as template:
            status = template.client.status()
            assert (status.state, status.mapped_bytes, status.port) == (WorkerState.TEMPLATE, 0, None)
            assert status.engine_versions
            assert template.memory.allocations == ()
            with pytest.raises(UsageError, match="template"):
                template.answers(_PROMPTS)

    def test_a_placed_template_loads_what_any_start_loads(self, live: Driven, tmp_path: Path) -> None:
        exported, answers = live.export(), live.answers(_PROMPTS)
        with self.beside(1, tmp_path / "t", template=True) as template:
            assert template.place().wake is None
            assert template.environment == {"COLDSNAP_PLACED": "here"}
            assert template.client.status().state is WorkerState.IDLE
            assert template.answers(_PROMPTS) == answers
            again = template.export()
        assert exported.pack is not None
        assert again.pack is not None
        assert again.pack.sha256 == exported.pack.sha256

    @pytest.mark.parametrize("source", [PackSource.NATIVE, PackSource.RECOVERY])
    def test_a_placed_template_can_be_filled_from_a_capture(
        self, live: Driven, tmp_path: Path, source: PackSource
    ) -> None:
        """At other addresses than at capture; and it goes on with the captured manifests."""
        exported, answers, before = live.export(), live.answers(_PROMPTS), live.contents()
        with self.beside(0, tmp_path / "t", template=True) as template:
            placed = template.place(exported, source)
            assert placed.wake is not None
            assert (placed.wake.model_bytes, placed.wake.residual_bytes) == (
                exported.model_bytes,
                exported.residual_bytes,
            )
            assert [one.tag for one in template.memory.allocations] == [one.tag for one in live.memory.allocations]
            assert not set(template.contents()) & set(before), "the same addresses would prove nothing"
            assert list(template.contents().values()) == list(before.values())
            assert template.answers(_PROMPTS) == answers
            template.sleep()
            template.wake(exported, source)
            assert list(template.contents().values()) == list(before.values())
            assert template.answers(_PROMPTS) == answers
            content = template.lose_pack(exported)
            assert Path(template.materialize(exported).pack.path).read_bytes() == content
            port = free_port()
            template.serve(port)
            assert post(port, "/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 0})[0] == 200

    def test_the_residual_holds_no_address(self, live: Driven, tmp_path: Path) -> None:
        exported = live.export()
        with self.beside(0, tmp_path / "t", template=True) as template:
            template.place(exported)
            again = template.export()
        assert exported.residual is not None
        assert again.residual is not None
        assert again.residual.sha256 == exported.residual.sha256

    def test_a_template_filled_with_nothing_gives_other_answers(self, live: Driven, tmp_path: Path) -> None:
        exported, answers = live.export(), live.answers(_PROMPTS)
        with self.beside(0, tmp_path / "t", template=True) as template:
            template.place(exported, PackSource.NONE)
            assert all(not any(data) for data in template.contents().values())
            assert template.answers(_PROMPTS) != answers

    def test_a_template_filled_with_one_changed_tensor_gives_other_answers(self, live: Driven, tmp_path: Path) -> None:
        exported, answers = live.export(), live.answers(_PROMPTS)
        changed = repack_with_change(exported, tmp_path / "changed")
        with self.beside(0, tmp_path / "t", template=True) as template:
            template.place(
                exported,
                native_manifest=str(changed.native_manifest),
                pack=str(changed.pack),
                pack_sha256=changed.sha256,
                pack_bytes=changed.bytes,
            )
            assert template.answers(_PROMPTS) != answers

    def test_a_template_of_another_layout_is_refused_and_holds_nothing(self, live: Driven, tmp_path: Path) -> None:
        exported = live.export()
        manifest = parse_native_manifest(Path(exported.native_manifest.path).read_bytes())
        victim, *others = manifest.model_weight_extents
        drifted = tmp_path / "drifted.json"
        drifted.write_bytes(
            native_manifest_bytes(
                replace(manifest, model_weight_extents=(replace(victim, semantic_id="0" * 64), *others))
            )
        )
        drifted.chmod(0o600)
        with self.beside(0, tmp_path / "t", template=True) as template:
            with pytest.raises(Refused, match=r"model_weight_extents\[0\].*0{64}"):
                template.place(exported, native_manifest=str(drifted))
            status = template.client.status()
            assert (status.state, status.mapped_bytes, template.memory.mapped) == (WorkerState.FAILED, 0, False)
            with pytest.raises(UsageError, match="failed"):
                template.place(exported)

    def make_damaged(self, folder: Path) -> EngineWorker:
        """A new engine whose checkpoint in `folder` is not the pinned one."""
        raise NotImplementedError


def _moved(manifest: NativeManifest, *, by: int) -> NativeManifest:
    return replace(
        manifest,
        entries=tuple(replace(one, ptr=one.ptr + by) for one in manifest.entries),
        model_weight_extents=tuple(
            replace(one, ptr=one.ptr + by, allocation_ptr=one.allocation_ptr + by)
            for one in manifest.model_weight_extents
        ),
        residual_extents=tuple(
            replace(one, ptr=one.ptr + by, allocation_ptr=one.allocation_ptr + by) for one in manifest.residual_extents
        ),
    )


def _sockets() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this very listing is gone by now
            target = str(link.readlink())
            if target.startswith(("socket:", "anon_inode:")):
                found.add(target)
    return found
