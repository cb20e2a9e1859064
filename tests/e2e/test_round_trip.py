"""Capture a real process tree, see it gone, restore it: the same tokens as a separate cold process, every time."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from coldsnap.capsule.identity import start_ticks
from coldsnap.core.manifest import parse_native_manifest
from coldsnap.core.messages import Answer, PackSource
from coldsnap.errors import AcceptanceFailed, UsageError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.assembly import NATIVE_MANIFEST
from coldsnap.ops.live import service_status, stop_service
from coldsnap.ops.tidy import plan_delete, run_delete
from coldsnap.ops.verify import verify_artifact
from coldsnap.ops.windows import windows_in
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.stand import UNSEEN, Stand, wait_for

pytestmark = pytest.mark.criu


def gone(processes: tuple[tuple[int, int], ...]) -> bool:
    return all(start_ticks(pid) != ticks for pid, ticks in processes)


@contextmanager
def taken(pid: int) -> Iterator[bool]:
    """Some process of ours has this PID meanwhile; False when the kernel gave it to somebody else first."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(20):
        last.write_text(str(pid - 1))
        with subprocess.Popen(["/bin/sleep", "600"]) as process:
            try:
                if process.pid == pid:
                    yield True
                    return
            finally:
                process.kill()
    yield Path(f"/proc/{pid}").exists()


def test_the_captured_processes_are_gone(stand: Stand) -> None:
    assert len(stand.result.processes) >= 1
    assert gone(stand.result.processes)
    stand.assert_nothing_left()


def test_the_capture_never_saw_the_prompts_that_judge_it(stand: Stand) -> None:
    asked = {prompt.text for prompt in stand.loaded.acceptance()[0]}
    assert asked.isdisjoint(prompt.text for prompt in UNSEEN)
    assert len(UNSEEN) >= 3


def test_prepare_then_restore_gives_the_cold_answers_twice_in_a_row(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.prepare("prepare-1")
    for operation_id in ("twice-1", "twice-2"):
        result = stand.restore(operation_id)
        assert result.prepared_from_record
        assert result.source == "native"
        assert stand.ask(UNSEEN) == expected
        stop_service(stand.tools, "svc")
        stand.assert_nothing_left()


def test_a_running_service_is_replaced(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("replace-1")
    old = service_status(stand.tools, "svc").pids
    assert stand.restore("replace-2").evicted
    new = service_status(stand.tools, "svc").pids
    assert set(old).isdisjoint(new)
    assert not any(Path(f"/proc/{pid}").exists() for pid in old)
    assert stand.ask(UNSEEN) == expected
    stand.assert_nothing_left(but_for=["svc"])


def test_two_services_side_by_side(stand: Stand, expected: tuple[Answer, ...]) -> None:
    """Both trees have the same PIDs, the same addresses and the same socket names, each in its own unit."""
    ports = {"left": free_port(), "right": free_port()}
    for name, port in ports.items():
        stand.restore(f"side-{name}", name=name, port=port)
    for port in ports.values():
        assert stand.ask(UNSEEN, port) == expected
    left, right = (service_status(stand.tools, name) for name in ports)
    assert set(left.pids).isdisjoint(right.pids)
    inside = [status.workers["w0"].pid for status in (left, right) if not isinstance(status.workers["w0"], str)]
    assert len(inside) == 2
    assert inside[0] == inside[1]
    stop_service(stand.tools, "left")
    assert stand.ask(UNSEEN, ports["right"]) == expected, "stopping one must not touch the other"


def test_restore_while_the_old_pids_belong_to_others(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("pids-0")
    (unit,) = stand.tools.services.must_load("svc").units
    stop_service(stand.tools, "svc")
    with ExitStack() as stack:
        for pid in {*(pid for pid, _ in stand.result.processes), unit.record["root_pid"]}:
            assert stack.enter_context(taken(pid)), f"nobody has PID {pid}"
        stand.restore("pids-1")
        assert stand.ask(UNSEEN) == expected


def test_warm_then_wake(stand: Stand, expected: tuple[Answer, ...]) -> None:
    assert stand.restore("warm-1", warm=True).state == "warm"
    status = service_status(stand.tools, "svc")
    assert status.state == "warm"
    assert not isinstance(status.workers["w0"], str)
    assert (status.workers["w0"].state.value, status.workers["w0"].mapped_bytes) == ("asleep", 0)
    with pytest.raises(UsageError, match="cannot sleep"):
        stand.sleep("warm-sleep")
    stand.wake("warm-wake")
    assert stand.ask(UNSEEN) == expected


def test_sleep_then_wake(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("sleep-0")
    pids = service_status(stand.tools, "svc").pids
    before = resident_bytes(pids)
    stand.sleep("sleep-1")
    asleep = service_status(stand.tools, "svc")
    assert (asleep.state, asleep.pids) == ("asleep", pids)
    assert before - resident_bytes(pids) > 2_000_000, "the weights' memory is given back"
    with pytest.raises(Exception, match="did not answer"):
        stand.ask(UNSEEN[:1])
    stand.wake("sleep-2")
    assert service_status(stand.tools, "svc").pids == pids
    assert stand.ask(UNSEEN) == expected


def resident_bytes(pids: tuple[int, ...]) -> int:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")


def test_recovery_needs_no_pack(stand: Stand, expected: tuple[Answer, ...]) -> None:
    pack = stand.tools.store.path(stand.result.pack_digests[0])
    away = pack.with_name("away")
    pack.rename(away)
    try:
        result = stand.restore("recovery-1")
        assert (result.source, result.wake["w0"].source) == ("recovery", PackSource.RECOVERY)
        assert stand.ask(UNSEEN) == expected
    finally:
        away.rename(pack)


def test_a_restore_without_hydration_is_caught(stand: Stand) -> None:
    with pytest.raises(AcceptanceFailed, match="from token 0 on"):
        stand.restore("negative-1", negative_control=True)
    stand.assert_nothing_left()


def test_a_service_that_dies_is_seen_and_can_be_restored(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("dies-1")
    pids = service_status(stand.tools, "svc").pids
    os.kill(pids[0], 9)
    wait_for("the tree to end", lambda: service_status(stand.tools, "svc").state == "lost")
    assert stand.restore("dies-2").evicted
    assert stand.ask(UNSEEN) == expected


def test_no_window_of_the_pack_is_in_the_process_images(stand: Stand) -> None:
    """Not 200 random windows but every one: all 64-byte pieces of the pack, in every image file."""
    stand.prepare("windows-1")
    pack = stand.tools.store.path(stand.result.pack_digests[0]).read_bytes()
    pieces = (pack[start : start + 64] for start in range(0, len(pack), 64))
    windows = {piece for piece in pieces if len(set(piece)) > 40}  # padding is zeros, and zeros are everywhere
    assert len(windows) > 40_000
    images = stand.tools.state.prepared / stand.loaded.capsule_digest("u0").hex / "process"
    data = b"".join(path.read_bytes() for path in images.iterdir())
    assert len(data) == stand.result.image_bytes
    planted = random.Random(1).choice(sorted(windows))
    assert windows_in(data + planted, windows) == {planted}, "and one that was put there is found"


def test_every_byte_of_the_artifact_is_proved(stand: Stand) -> None:
    proofs = verify_artifact(stand.tools, stand.loaded)
    subjects = ["capsule of u0", "prepared copy of u0", "manifests of w0", "pack of w0"]
    assert [proof.subject for proof in proofs] == subjects
    assert all(proof.problems == () and proof.bytes > 0 for proof in proofs)


def test_captures_of_another_order_and_address_share_the_pack(stand: Stand, expected: tuple[Answer, ...]) -> None:
    base = 0x5A00_0000_0000
    second = stand.capture("capture-2", "second.json", serve={"shuffle": 3, "arena_base": base})
    assert second.pack_digests == stand.result.pack_digests
    assert (stand.result.pack_shared, second.pack_shared) == (False, True)
    loaded = load_artifact(second.artifact_path)
    first_ptrs, second_ptrs = (pointers(stand, one, f"ptr-{i}") for i, one in enumerate((stand.loaded, loaded)))
    assert min(second_ptrs) == base
    assert set(first_ptrs).isdisjoint(second_ptrs)
    assert [ptr - min(first_ptrs) for ptr in first_ptrs] != [ptr - base for ptr in second_ptrs]
    stand.restore("shared-1", loaded)
    assert stand.ask(UNSEEN) == expected
    stop_service(stand.tools, "svc")
    plan = plan_delete(stand.tools, second.artifact_path)
    assert plan.shared == ((str(second.pack_digests[0]), str(stand.loaded.path)),)
    run_delete(stand.tools, plan)
    assert not second.artifact_path.exists()
    stand.restore("shared-2")
    assert stand.ask(UNSEEN) == expected, "the first artifact keeps its pack"


def pointers(stand: Stand, loaded: LoadedArtifact, operation_id: str) -> list[int]:
    """Where each extent of the pack was in memory, in the order of the pack."""
    stand.prepare(operation_id, loaded)
    entry = loaded.worker_object("w0", NATIVE_MANIFEST)
    assert entry is not None
    path = stand.tools.state.prepared / loaded.capsule_digest("u0").hex / entry.path
    return [one.ptr for one in parse_native_manifest(path.read_bytes()).model_weight_extents]
