"""Which cases a campaign has: a pure function of what the operations reach, and of the seed.

Every point of every operation gets a SIGKILL and one more act, which one is the seed's choice; of an operation that
goes mostly the way of another, one of the two. A new point in the code is struck without anybody listing it here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coldsnap.testing.faults.case import Case
from coldsnap.testing.faults.commands import COMMANDS
from coldsnap.testing.faults.damage import EMPTY, HOWS, MATTERS, OF_EMPTY
from coldsnap.testing.faults.operations import OPERATIONS
from coldsnap.testing.faults.rogue import MUTATIONS
from coldsnap.testing.faults.strangers import SCENES
from coldsnap.testing.faults.strikes import Act
from coldsnap.testing.faults.surroundings import ACCESS

__all__ = ["list_cases", "list_real_cases"]

Profile = Mapping[str, Any]

_CONTROLLER_ACTS = (Act.INTERRUPT, Act.BUG, Act.FULL, Act.BROKEN, Act.MEMORY, Act.STALL)
_WORKER_ACTS = (Act.BUG, Act.FULL, Act.BROKEN, Act.MEMORY, Act.STALL, Act.STOP)
_WRITES_PER_HOW = 4
_MIB = 1 << 20
_DISK: Mapping[str, tuple[int, ...]] = {
    "capture": (0, 16_384, 65_536, 200_000, 400_000, _MIB, 5 * _MIB, 12 * _MIB, 22 * _MIB, 26 * _MIB, 28 * _MIB),
    "recapture": (0, 16_384, 200_000, _MIB, 12 * _MIB, 24 * _MIB, 28 * _MIB),
    "prepare": (0, 8_192, 200_000, 8 * _MIB, 20 * _MIB, 23 * _MIB),
    "restore-unprepared": (0, 100_000, 12 * _MIB, 22 * _MIB),
    "restore": (0, 4_096, 8_192),
    "replace": (0, 4_096),
    "recover": (0, 8_192),
    "recover-required": (0, 8_192, 65_536),
    "materialize": (0, 8_192, 65_536, 150_000),
    "overlay": (0, 65_536, 12 * _MIB, 24 * _MIB),
    "cold": (0, 8_192),
    "sleep": (0, 4_096),
    "wake": (0, 4_096),
    "stop": (0,),
    "gc": (0,),
    "delete": (0,),
    "verify": (0,),
}
_FILE_SIZES: Mapping[str, tuple[int, ...]] = {
    "capture": (0, 1_000, 4_096, 20_000, 100_000, _MIB, 4 * _MIB),
    "prepare": (1_000, 20_000, 100_000, _MIB, 10 * _MIB),
    "restore": (0, 500, 1_500),
    "restore-unprepared": (4_096, _MIB),
    "wake": (0, 1_500),
    "sleep": (0, 500),
}
_OPEN_FILES: Mapping[str, tuple[int, ...]] = {
    "capture": (14, 20, 32),
    "restore": (12, 16, 20, 24),
    "prepare": (12, 18),
    "verify": (8, 10),
    "sleep": (8, 10),
    "wake": (10, 12, 16),
    "gc": (8, 10),
    "stop": (6, 8),
}
_ACCESS: Mapping[str, tuple[str, ...]] = {
    "restore": tuple(ACCESS),
    "capture": ("read-only", "as-nobody", "public:staging", "public:locks", "foreign:model-payloads/sha256"),
    "prepare": ("read-only", "as-nobody", "public:prepared", "link:prepared", "foreign:locks"),
    "replace": ("public:services", "foreign:services", "link:services"),
    "sleep": ("public:services", "foreign:receipts"),
    "wake": ("public:model-payloads/sha256", "link:locks"),
    "gc": ("read-only", "link:staging", "public:capsules", "foreign:prepared"),
    "delete": ("read-only", "link:capsules", "link:model-payloads/sha256"),
    "verify": ("read-only", "link:staging"),
}
_RACES: tuple[tuple[str, str], ...] = (
    ("capture", "capture"),
    ("capture", "recapture"),
    ("capture", "gc"),
    ("recapture", "delete"),
    ("recapture", "gc"),
    ("recapture", "restore"),
    ("prepare", "prepare"),
    ("prepare", "restore"),
    ("prepare", "gc"),
    ("restore", "restore"),
    ("restore", "prepare"),
    ("restore", "delete"),
    ("restore", "gc"),
    ("restore", "verify"),
    ("restore", "stop"),
    ("restore-unprepared", "restore"),
    ("restore-unprepared", "verify"),
    ("replace", "stop"),
    ("replace", "sleep"),
    ("replace", "status"),
    ("recover", "recapture"),
    ("recover-async", "recapture"),
    ("recover-async", "stop"),
    ("recover-required", "verify"),
    ("materialize", "materialize"),
    ("materialize", "restore"),
    ("materialize", "gc"),
    ("overlay", "overlay"),
    ("overlay", "restore"),
    ("restore-overlay", "delete"),
    ("sleep", "sleep"),
    ("sleep", "stop"),
    ("sleep", "restore"),
    ("wake", "wake"),
    ("wake", "stop"),
    ("wake", "restore"),
    ("wake", "gc"),
    ("stop", "restore"),
    ("gc", "gc"),
    ("gc", "prepare"),
    ("delete", "delete"),
    ("delete", "restore"),
    ("verify", "gc"),
)
_REPLIES: tuple[tuple[str, str], ...] = (
    ("capture", "status"),
    ("capture", "answer"),
    ("capture", "export"),
    ("capture", "sleep"),
    ("restore", "wake"),
    ("restore", "answer"),
    ("restore", "serve"),
    ("sleep", "sleep"),
    ("wake", "wake"),
    ("wake", "answer"),
    ("status", "status"),
)
_SCENE_OPERATIONS = ("replace", "sleep", "stop", "status", "wake")
_AROUND: tuple[tuple[str, str, Act], ...] = (
    *(
        (operation, f"unit.{phase}", Act.KILL_INIT)
        for operation in ("capture", "restore", "replace", "recover", "warm")
        for phase in ("init", "mounts", "files", "pids", "started", "releasing", "released")
        if operation != "capture" or phase not in ("releasing", "released")
    ),
    *(("capture", f"unit.{phase}", Act.KILL_INIT) for phase in ("clock", "exec")),
    *((operation, "unit.criu", act) for operation in ("restore", "replace", "recover", "warm", "restore-unprepared")
      for act in (Act.KILL_INIT, Act.KILL_CRIU)),
    *(("capture", "dump.dumping", act) for act in (Act.KILL_INIT, Act.KILL_CRIU, Act.KILL_ENGINE)),
    *(("recapture", f"dump.{at}", Act.KILL_INIT) for at in ("begun", "dumped", "saved", "described")),
    *(("recapture", f"dump.{at}", Act.KILL_ENGINE) for at in ("begun", "dumped", "saved")),
    *(
        (operation, point, act)
        for operation, points in (
            ("capture", ("capture.launched", "capture.loaded", "capture.exported")),
            ("restore", ("restore.thawed", "restore.hydrated", "restore.accepted", "restore.serving", "restore.done")),
            ("wake", ("wake.prepared", "restore.hydrated", "restore.accepted", "wake.done")),
            ("sleep", ("sleep.asked", "sleep.done")),
        )
        for point in points
        for act in (Act.KILL_ENGINE, Act.STOP_ENGINE)
    ),
    *(("recapture", f"capture.{at}", Act.KILL_ENGINE) for at in ("asleep", "inspected")),
)  # fmt: skip


_REAL_STRIKES: tuple[tuple[str, str, Act], ...] = (
    (
        "restore",
        (
            "restore.leased restore.prepared restore.recorded unit.criu unit.memory unit.started restore.thawed "
            "restore.named restore.hydrated restore.accepted restore.serving restore.done restore.released "
            "receipt.writing"
        ),
        Act.KILL,
    ),
    ("restore", "unit.criu restore.thawed restore.accepted restore.done", Act.INTERRUPT),
    ("restore", "unit.criu unit.memory unit.started restore.hydrated", Act.KILL_INIT),
    ("restore", "unit.criu", Act.KILL_CRIU),
    ("restore", "restore.thawed restore.hydrated restore.serving", Act.KILL_ENGINE),
    ("replace", "restore.evicting restore.killed restore.evicted restore.thawed", Act.KILL),
    ("sleep", "sleep.asked sleep.done", Act.KILL),
    ("sleep", "sleep.asked", Act.KILL_ENGINE),
    ("wake", "wake.prepared restore.hydrated restore.accepted wake.done", Act.KILL),
    ("wake", "wake.prepared restore.hydrated", Act.KILL_ENGINE),
    ("recover", "restore.thawed restore.hydrated", Act.KILL),
    ("warm", "restore.thawed restore.done", Act.KILL),
    ("stop", "stop.killed", Act.KILL),
)
_REAL_DAMAGE = (
    ("restore", "pack", "flip"),
    ("restore", "pack", "flip-quiet"),
    ("restore", "process-pages", "flip"),
    ("restore", "process-pages", "flip-quiet"),
    ("restore", "process-memory", "flip"),
    ("restore", "process-memory", "flip-quiet"),
    ("restore", "residual", "flip-quiet"),
    ("restore-unprepared", "capsule-process", "flip"),
    ("recover", "checkpoint", "flip"),
    ("recover", "checkpoint", "flip-quiet"),
    ("verify", "pack", "flip-quiet"),
)


def list_cases(profile: Profile, *, seed: int) -> list[Case]:
    """Every case, in an order that mixes the families, so that a campaign cut short has seen some of each."""
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    listed = [
        Case(family=family, operation=operation, params=params, seed=seed)
        for family, operation, params in (
            *_points(profile, chance),
            *_writes(profile),
            *_around(),
            *_damage(chance),
            *_surroundings(),
            *_races(profile, chance),
            *_replies(),
            *_scenes(),
            *_commands(profile, chance),
        )
    ]
    cases = list({case.name: case for case in listed}.values())
    chance.shuffle(cases)
    return cases


Spec = tuple[str, str, dict[str, Any]]


def _points(profile: Profile, chance: random.Random) -> Iterator[Spec]:
    for operation, found in profile.items():
        for role, point, times in found["points"]:
            acts = (Act.KILL, chance.choice(_CONTROLLER_ACTS if role == "controller" else _WORKER_ACTS))
            for act in (chance.choice(acts),) if OPERATIONS[operation].is_variant else acts:
                params = {"role": role, "point": point, "act": act.value}
                yield "point", operation, params if times == 1 else {**params, "nth": chance.randint(1, times)}


def _writes(profile: Profile) -> Iterator[Spec]:
    for operation, found in profile.items():
        for role, count in found["writes"].items():
            for number, how in enumerate(("torn", "before", "after")):
                wanted = _WRITES_PER_HOW * (2 if how == "torn" else 1) // (2 if OPERATIONS[operation].is_variant else 1)
                step = max(1.0, count / wanted)
                places = {1 + int((index + number / 3) * step) for index in range(wanted)}
                for nth in sorted(place for place in places if place <= count):
                    yield "write", operation, {"role": role, "nth": nth, "how": how}


def _around() -> Iterator[Spec]:
    for operation, point, act in _AROUND:
        yield "point", operation, {"role": "controller", "point": point, "act": act.value}


def _damage(chance: random.Random) -> Iterator[Spec]:
    for kind, operations in MATTERS.items():
        for number, operation in enumerate(operations):
            # the first operation that reads it sees every way, the others some
            every = OF_EMPTY if kind in EMPTY else tuple(HOWS)
            more = () if kind in EMPTY else ("flip", "flip", "cut")
            hows: Sequence[str] = (*every, *more) if number == 0 else chance.sample(sorted(every), 3)
            for index, how in enumerate(hows):
                yield "damage", operation, {"file": kind, "how": how} | ({"try": index} if index >= len(every) else {})


def _surroundings() -> Iterator[Spec]:
    for operation, sizes in _DISK.items():
        for free in sizes:
            yield "disk", operation, {"free": free}
    for limit, values in (("file-size", _FILE_SIZES), ("open-files", _OPEN_FILES)):
        for operation, several in values.items():
            for value in several:
                yield "limit", operation, {"limit": limit, "value": value}
    for operation, whats in _ACCESS.items():
        for what in whats:
            yield "access", operation, {"what": what}


def _races(profile: Profile, chance: random.Random) -> Iterator[Spec]:
    for operation, rival in _RACES:
        points = [point for role, point, _ in profile[operation]["points"] if role == "controller"]
        for act in (Act.STALL, Act.STALL, Act.KILL):
            point = chance.choice(points) if points else "none"
            yield "race", operation, {"rival": rival, "point": point, "act": act.value}


def _replies() -> Iterator[Spec]:
    for operation, verb in _REPLIES:
        for mutation in MUTATIONS:
            yield "reply", operation, {"verb": verb, "mutation": mutation}


def _scenes() -> Iterator[Spec]:
    for operation in _SCENE_OPERATIONS:
        for scene in SCENES:
            yield "scene", operation, {"scene": scene}


def _commands(profile: Profile, chance: random.Random) -> Iterator[Spec]:
    for operation in COMMANDS:
        points = [point for role, point, _ in profile[operation]["points"] if role == "controller"]
        for act in (Act.KILL, Act.INTERRUPT, Act.BUG):
            yield "command", operation, {"point": chance.choice(points), "act": act.value}


def list_real_cases(*, seed: int) -> list[Case]:
    """Cases for a real engine: it is slower, so only the ones that its processes make different."""
    cases = [
        Case(
            family="point",
            operation=operation,
            params={"role": "controller", "point": point, "act": act.value},
            seed=seed,
            engine="real",
        )
        for operation, points, act in _REAL_STRIKES
        for point in points.split()
    ]
    cases += [
        Case(family="damage", operation=operation, params={"file": kind, "how": how}, seed=seed, engine="real")
        for operation, kind, how in _REAL_DAMAGE
    ]
    random.Random(seed).shuffle(cases)  # noqa: S311 - repeatable, not secret
    return cases
