"""The operations that are struck: the world each begins in, its verb, its plain rerun, and the proof of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coldsnap.testing.faults import reruns, verbs, worlds
from coldsnap.testing.faults.lane import Lane, Verb
from coldsnap.testing.faults.reruns import Rerun

__all__ = ["OPERATIONS", "Operation"]

World = Callable[[Lane], None]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """See the module's head.

    ``again`` is a plain rerun, which yields what did not work. ``restored``: a process that CRIU restored is there
    before. ``deletes``: committed files may be gone afterwards. ``is_variant``: it goes mostly the way of another, and
    is struck less often.
    """

    name: str
    world: World
    verb: Verb
    again: Rerun
    restored: bool = False
    deletes: bool = False
    is_variant: bool = False


OPERATIONS: dict[str, Operation] = {
    one.name: one
    for one in (
        Operation(name="capture", world=worlds.blank, verb=verbs.do_capture, again=reruns.again_capture),
        Operation(
            name="recapture",
            world=worlds.captured,
            verb=verbs.do_capture_again,
            again=reruns.again_capture,
            is_variant=True,
        ),
        Operation(name="prepare", world=worlds.unprepared, verb=verbs.do_prepare, again=reruns.again_prepare),
        Operation(name="restore", world=worlds.captured, verb=verbs.do_restore, again=reruns.again_restore),
        Operation(
            name="restore-unprepared",
            world=worlds.unprepared,
            verb=verbs.do_restore,
            again=reruns.again_restore,
            is_variant=True,
        ),
        Operation(
            name="restore-staged",
            world=worlds.captured,
            verb=verbs.do_restore_staged,
            again=reruns.again_restore,
            is_variant=True,
        ),
        Operation(
            name="replace",
            world=worlds.serving,
            verb=verbs.do_restore,
            again=reruns.again_restore,
            restored=True,
            is_variant=True,
        ),
        Operation(
            name="recover", world=worlds.packless, verb=verbs.do_restore, again=reruns.again_restore, is_variant=True
        ),
        Operation(
            name="recover-async",
            world=worlds.packless,
            verb=verbs.do_recover_async,
            again=reruns.again_recover(verbs.do_recover_async),
            is_variant=True,
        ),
        Operation(
            name="recover-required",
            world=worlds.packless,
            verb=verbs.do_recover_required,
            again=reruns.again_recover(verbs.do_recover_required),
            is_variant=True,
        ),
        Operation(name="cold", world=worlds.capsuleless, verb=verbs.do_cold, again=reruns.again_cold),
        Operation(name="materialize", world=worlds.packless, verb=verbs.do_materialize, again=reruns.again_materialize),
        Operation(
            name="overlay", world=worlds.captured, verb=verbs.do_overlay, again=reruns.again_overlay, is_variant=True
        ),
        Operation(
            name="restore-overlay",
            world=worlds.overlaid,
            verb=verbs.do_restore,
            again=reruns.again_restore,
            is_variant=True,
        ),
        Operation(
            name="restore-once-failed",
            world=worlds.failed_once,
            verb=verbs.do_restore,
            again=reruns.again_restore_cleared,
            is_variant=True,
        ),
        Operation(name="warm", world=worlds.captured, verb=verbs.do_warm, again=reruns.again_warm, is_variant=True),
        Operation(
            name="wake-warm",
            world=worlds.warm,
            verb=verbs.do_wake,
            again=reruns.again_wake,
            restored=True,
            is_variant=True,
        ),
        Operation(name="sleep", world=worlds.serving, verb=verbs.do_sleep, again=reruns.again_sleep, restored=True),
        Operation(name="wake", world=worlds.asleep, verb=verbs.do_wake, again=reruns.again_wake, restored=True),
        Operation(name="stop", world=worlds.serving, verb=verbs.do_stop, again=reruns.again_stop, restored=True),
        Operation(name="status", world=worlds.serving, verb=verbs.do_status, again=reruns.again_status, restored=True),
        Operation(name="gc", world=worlds.littered, verb=verbs.do_gc, again=reruns.again_gc),
        Operation(name="delete", world=worlds.captured, verb=verbs.do_delete, again=reruns.again_delete, deletes=True),
        Operation(name="verify", world=worlds.captured, verb=verbs.do_verify, again=reruns.again_verify),
        Operation(name="explain", world=worlds.captured, verb=verbs.do_explain, again=reruns.again_explain),
    )
}
"""Every operation by name."""
