"""The one verifier of packs, as a verb for the host that has the file, whoever asks.

The proof is ``store.admission.admit_file``, the same that every restore asks. What it says is a contract: a result
that a program on another host can read, with one of the five reasons when the answer is no.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.core.digest import Digest
from coldsnap.core.names import is_id
from coldsnap.core.validation import Evidence
from coldsnap.errors import PayloadRejected, UsageError
from coldsnap.ops.report import Reporter
from coldsnap.store.admission import admit_file
from coldsnap.store.payloads import PACK_SUFFIX

__all__ = ["PayloadVerdict", "verify_payload"]

_KIND = "coldsnap-payload-verification"


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadVerdict:
    """Whether a file may be used as the pack it is said to be.

    ``rejection`` is why not; else there is ``evidence``, which an earlier proof gave when ``from_record``.
    """

    path: Path
    sha256: str
    bytes: int
    worker: str | None
    seconds: float
    evidence: Evidence | None = None
    from_record: bool = False
    recorded: bool = False
    rejection: PayloadRejected | None = None

    def document(self) -> dict[str, Any]:
        """As JSON, format 1; docs/format.md has the members."""
        no = self.rejection
        return {
            "format": 1,
            "kind": _KIND,
            "admitted": no is None,
            "reason": no.reason if no is not None else None,
            "message": no.message if no is not None else None,
            "cure": no.cure if no is not None else None,
            "worker": self.worker,
            "path": str(self.path),
            "expected": {"bytes": self.bytes, "sha256": self.sha256},
            "content_evidence": self.evidence.value if self.evidence is not None else None,
            "from_record": self.from_record,
            "recorded": self.recorded,
            "seconds": self.seconds,
        }


def verify_payload(
    path: Path, expected_sha256: str, expected_bytes: int, *, worker: str | None = None, reporter: Reporter
) -> PayloadVerdict:
    """Prove that ``path`` is the pack of this digest and size, by an earlier proof of this very file or in full.

    A refusal is an answer and is not raised. Raises UsageError for a worker that is no id, HostError when the file
    cannot be read to its end.
    """
    if worker is not None and not is_id(worker):
        raise UsageError(f"--worker is {worker!r}, which is no id", cure="name a worker of the artifact, such as w0")
    began = time.monotonic()
    place = path.absolute()
    evidence, from_record, recorded, rejection = None, False, False, None
    try:
        digest = _expected(expected_sha256, expected_bytes)
        _check_name(place, digest)
        with (
            reporter.phase(f"verify {place.name}", total_bytes=expected_bytes) as advance,
            admit_file(place, digest, expected_bytes, progress=advance) as admitted,
        ):
            evidence, from_record, recorded = admitted.evidence, admitted.from_record, admitted.recorded
    except PayloadRejected as error:
        rejection = error
    return PayloadVerdict(
        path=place,
        sha256=expected_sha256,
        bytes=expected_bytes,
        worker=worker,
        seconds=time.monotonic() - began,
        evidence=evidence,
        from_record=from_record,
        recorded=recorded,
        rejection=rejection,
    )


def _expected(text: str, num_bytes: int) -> Digest:
    try:
        digest = Digest.parse(text)
    except ValueError as error:
        cure = "take digest and size from the artifact"
        raise PayloadRejected("invalid_expected_digest", f"--expected-sha256: {error}", cure=cure) from error
    if num_bytes < 0:
        message, cure = f"--expected-bytes is {num_bytes}", "take digest and size from the artifact"
        raise PayloadRejected("invalid_expected_digest", message, cure=cure)
    return digest


def _check_name(path: Path, digest: Digest) -> None:
    name = f"{digest.hex}{PACK_SUFFIX}"
    if path.name != name:
        message = f"{path} is not named by the digest {digest}"
        raise PayloadRejected("unusable_path", message, cure=f"a pack of that digest is called {name}")
