"""One rule for every maker: a checkpoint folder exists only when it is whole.

Files are written into a sibling folder with a temporary name, flushed to disk, and the folder is renamed
last. A card (`coldsnap-checkpoint.json`) inside says how it was made, so a second call with the same card
returns at once and a call with another card refuses instead of mixing two models in one folder.

A maker that is killed leaves its sibling behind; the next call for the same folder removes those whose
maker is gone (the name carries its process id).
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coldsnap.errors import UsageError

CARD_NAME = "coldsnap-checkpoint.json"


def is_made(out: Path, card: Mapping[str, object]) -> bool:
    """Whether `out` is a whole checkpoint made with this card.

    Raises UsageError when `out` exists but was made otherwise, or is not a checkpoint of ours.
    """
    if not out.exists():
        return False
    try:
        found = json.loads((out / CARD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found == dict(card):
        return True
    was = "is not a checkpoint this maker wrote" if found is None else f"was made as {found}"
    raise UsageError(
        f"checkpoint folder {out} {was}, wanted {dict(card)}",
        cure="remove it or name another folder",
        facts={"path": str(out), "found": found, "wanted": dict(card)},
    )


@contextmanager
def written_aside(out: Path, card: Mapping[str, object]) -> Iterator[Path]:
    """A scratch folder that becomes `out`, with its card, if the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(out)
    scratch = out.parent / f".{out.name}.making-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        text = json.dumps(dict(card), indent=2, sort_keys=True) + "\n"
        (scratch / CARD_NAME).write_text(text, encoding="utf-8")
        for path in (*sorted(scratch.iterdir()), scratch):
            _flush(path)
        scratch.rename(out)
        _flush(out.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _remove_orphans(out: Path) -> None:
    prefix = f".{out.name}.making-"
    for path in out.parent.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix)
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
