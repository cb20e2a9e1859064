"""Captures and restores by command, and everything that is asked of them.

``Capture`` is one artifact of one recipe. Its restores are stopped between rounds, prepared outside the clock, and each
answers the unseen prompts; expected tokens come from the cold servers (``_vllm_cold``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._vllm_cold import answers_of
from benchmarks._vllm_command import HOST, Budget, Coldsnap, Restored, stream
from benchmarks._vllm_subject import Subject
from benchmarks.harness import summary
from benchmarks.restore import forget, warm

from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DriverId
from coldsnap.core.messages import Prompt
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.demo_parts import Restores, Story, free_port
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.windows import windows_in_images

__all__ = ["MODES", "Capture", "Seen"]

MODES = {"ahead": "--stage", "cached": "--no-stage", "disk": "--no-stage"}
"""Where packs are when the clock starts: in memory with huge pages, in the page cache, on the disk alone."""
_STREAMED = Prompt(text="The streamed answer to this is", max_tokens=16)


@dataclass(kw_only=True)
class Seen:
    """Restores of one mode."""

    rounds: list[Restored] = field(default_factory=list)
    prepare_s: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    streams: list[bool] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Every sample, where the time went, and the spans of the restore in the middle."""
        by_time = sorted(self.rounds, key=lambda one: one.verb.first_token_s)
        middle = by_time[(len(by_time) - 1) // 2]
        phases = [one.document["seconds"] for one in self.rounds]
        names = dict.fromkeys(name for one in phases for name in one)
        workers = [worker for one in self.rounds for worker in one.document["workers"].values()]
        steps = dict.fromkeys(name for one in workers for name in one["seconds"])
        return {
            "first_token_s": summary([one.verb.first_token_s for one in self.rounds]),
            "http_ready_s": summary([one.verb.http_ready_s for one in self.rounds]),
            "port_open_s": summary([one.verb.port_open_s for one in self.rounds]),
            "command_to_first_token_s": summary([one.command.first_token_s for one in self.rounds]),
            "prepare_s": list(self.prepare_s),
            "tokens_equal": list(self.equal),
            "prompts_agreed": list(self.agreed),
            "streamed_equal": list(self.streams),
            "phases_s": {name: summary([one.get(name, 0.0) for one in phases]) for name in names},
            "wake_s": {name: summary([one["seconds"].get(name, 0.0) for one in workers]) for name in steps},
            "sources": list(dict.fromkeys(one.document["source"] for one in self.rounds)),
            "transfers": list(dict.fromkeys(how for one in workers for how in one.get("transfer_path", {}).values())),
            "timeline": [
                [span["name"], span["clock"], span["start_offset_seconds"], span["duration_seconds"]]
                for span in middle.spans
            ],
        }

    @property
    def median_s(self) -> float:
        """Median of the verb to the first token."""
        return statistics.median(one.verb.first_token_s for one in self.rounds)


@dataclass(kw_only=True)
class Capture:
    """One artifact; made by `take`, or found where an earlier call of the proof left it."""

    subject: Subject
    coldsnap: Coldsnap
    name: str
    model: Path
    driver: DriverId
    expected: Mapping[str, Any]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    document: dict[str, Any] = field(default_factory=dict)

    @property
    def artifact(self) -> Path:
        """The descriptor."""
        return self.subject.folder / f"{self.name}.json"

    @property
    def budget(self) -> Budget:
        """What is left of this call."""
        return self.coldsnap.budget

    def take(self) -> dict[str, Any]:
        """Capture, in the place of an earlier one. What the command printed."""
        if self.artifact.exists():
            self.coldsnap.call("delete", self.artifact, "--yes")
            self.artifact.unlink(missing_ok=True)
        recipe = self.subject.recipe(self.name, self.model, self.driver, **self.recipe)
        self.document = self.coldsnap.call("capture", recipe, "-o", self.artifact, "--port", str(self.port))
        return self.document

    def digests(self) -> tuple[Digest, ...]:
        """The packs, each once."""
        return tuple(dict.fromkeys(pack.sha256 for pack in load_artifact(self.artifact).packs().values()))

    def restores(
        self, mode: str, *, rounds: int, words: Sequence[str] = (), share: float = 1.0, seen: Seen | None = None
    ) -> Seen:
        """Up to ``rounds`` restores, at least one; none is begun that could not end within this share of the budget.

        ``seen`` is where they go as they are made.
        """
        seen, longest = seen if seen is not None else Seen(), 0.0
        for _ in range(rounds):
            if seen.rounds and not self.budget.allows(longest * 1.5, share=share):
                break
            began = time.monotonic()
            self._round(seen, mode, words)
            longest = max(longest, time.monotonic() - began)
        return seen

    def _round(self, seen: Seen, mode: str, words: Sequence[str]) -> None:
        began = time.monotonic()
        self.coldsnap.call("prepare", self.artifact, MODES[mode])
        seen.prepare_s.append(time.monotonic() - began)
        for path in self.files():
            (forget if mode == "disk" else warm)(path)
        folder = self.subject.folder
        restored = self.coldsnap.restore(
            self.artifact, MODES[mode], *words, name=self.name, port=self.port, scratch=folder
        )
        try:
            equal = self.compare()
            seen.equal.append(all(equal))
            seen.agreed.append(sum(equal))
            seen.streams.append(self.streams())
        finally:
            self.stop()
        seen.rounds.append(restored)

    def stop(self) -> None:
        """End the service."""
        self.coldsnap.call("stop", self.name)

    def compare(self) -> list[bool]:
        """Prompt by prompt: did the service give the tokens of the cold server."""
        prompts = [Prompt.model_validate(one) for one in self.expected["prompts"]]
        given = answers_of(OutsideClient(host=HOST, port=self.port), prompts, self.budget)
        return [list(answer.token_ids) == ids for answer, ids in zip(given, self.expected["expected"], strict=True)]

    def streams(self) -> bool:
        """Whether a streamed answer comes in pieces, one after another, and is the one that comes at once."""
        whole = OutsideClient(host=HOST, port=self.port).complete([_STREAMED], timeout_s=self.budget.left())[0]
        seen = stream(
            self.port,
            _STREAMED.text,
            max_tokens=_STREAMED.max_tokens,
            timeout_s=self.budget.left(),
            now=time.monotonic,
        )
        return bool(seen["num_pieces"] > 1 and seen["ended"] and seen["text"] == whole.text)

    def negative_control(self) -> bool:
        """Whether a restore that leaves the memory zero is caught."""
        self.coldsnap.call("prepare", self.artifact)
        return Restores(self.subject.tools, self.artifact, self.port, Story(name=self.name)).negative_control()

    def windows(self) -> tuple[int, int]:
        """How many random pieces of the packs were looked for in the process images, and how many found."""
        self.coldsnap.call("prepare", self.artifact)
        capsules = tuple(image.digest for image in load_artifact(self.artifact).artifact.capsule.images)
        return windows_in_images(self.subject.tools, self.digests(), capsules)

    def files(self) -> list[Path]:
        """What a restore reads: packs, and the files of the process images."""
        tools, loaded = self.subject.tools, load_artifact(self.artifact)
        packs = [tools.store.path(digest) for digest in self.digests()]
        folders = [tools.state.prepared / image.digest.hex for image in loaded.artifact.capsule.images]
        images = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return [path for path in (*packs, *images) if path.exists() and path.stat().st_size]

    def processes_left(self) -> int:
        """Processes of the engine with this model and port, or with variables that name this proof's caches."""
        port, model, caches = (str(one).encode() for one in (self.port, self.model, self.subject.caches))
        left = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    variables = (entry / "environ").read_bytes()
                except OSError:  # it has ended, or is a zombie
                    continue
                left += {port, model}.issubset(words) or caches in variables
        return left
