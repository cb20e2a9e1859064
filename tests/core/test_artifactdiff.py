"""Sections of a comparison: what differs is said where a person looks for it, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from coldsnap.core.artifact import artifact_from
from coldsnap.core.artifactdiff import Section, compare_artifacts
from coldsnap.core.digest import Digest
from coldsnap.core.objects import payload_path
from coldsnap.testing.documents import artifact_example, digest_of

Document = dict[str, Any]
NAMES = (
    "capture", "model", "launch", "placement", "driver", "compatibility", "host files", "acceptance", "hygiene",
    "packs", "residual", "process images", "cache seeds",
)  # fmt: skip


def example() -> Document:
    """An artifact with something in every section."""
    document = artifact_example(num_units=1, workers_per_unit=2)
    bindings = document["runtime"]["bindings"]
    bindings += [
        {
            "kind": "coldsnap-acceptance",
            "answers": [{"prompt": "p", "max_tokens": 2, "token_ids": [1, 2], "text": "one"}],
        },
        {
            "kind": "coldsnap-process-images",
            "unit": "u0",
            "files": [
                {"path": "process/a.img", "bytes": 10, "sha256": digest_of("a")},
                {"path": "process/b.img", "bytes": 30, "sha256": digest_of("b")},
            ],
        },
        {
            "kind": "coldsnap-host-files",
            "unit": "u0",
            "files": [{"path": "/lib/x.so", "bytes": 5, "sha256": digest_of("x")}],
        },
        {"kind": "coldsnap-hygiene", "unit": "u0", "findings": [], "allowed_secrets": [], "publishable": True},
        {"kind": "coldsnap-service", "name": "svc"},
        {
            "kind": "coldsnap-worker-export",
            "worker": "w0",
            "model_bytes": 8000,
            "residual_bytes": 192,
            "residual_reasons": {"padding": 192},
        },
    ]
    document["capsule"]["objects"] += [
        {
            "role": "residual",
            "owner": "worker/w0",
            "path": "workers/w0/weights.blob",
            "bytes": 4096,
            "sha256": digest_of("residual"),
        },
        {
            "role": "cache-seed",
            "owner": "unit/u0",
            "path": "cache/k.bin",
            "bytes": 7,
            "sha256": digest_of("seed"),
        },
    ]
    return document


def compare(change: Callable[[Document], None]) -> dict[str, Section]:
    before, after = example(), copy.deepcopy(example())
    change(after)
    return {section.name: section for section in compare_artifacts(artifact_from(before), artifact_from(after))}


def binding(document: Document, kind: str) -> Document:
    return next(one for one in document["runtime"]["bindings"] if one["kind"] == f"coldsnap-{kind}")


def only(sections: dict[str, Section], name: str) -> list[tuple[str, str, str]]:
    assert {key for key, section in sections.items() if not section.same} == {name}
    return [(one.field, one.before, one.after) for one in sections[name].changes]


def test_an_artifact_is_the_same_as_itself() -> None:
    sections = compare(lambda document: None)
    assert tuple(sections) == NAMES
    assert all(section.same for section in sections.values())
    assert sections["packs"].shared_bytes == 8192, "one pack that two workers name counts once"
    assert sections["process images"].shared_bytes == 40
    assert {name for name, section in sections.items() if not section.counts} == {"capture", "placement"}


def test_which_capture_it_is() -> None:
    def change(document: Document) -> None:
        document["capture_id"] = "capture-2"
        binding(document, "service")["name"] = "other"

    assert only(compare(change), "capture") == [
        ("capture_id", '"capture-1"', '"capture-2"'),
        ("service", '"svc"', '"other"'),
    ]


def test_the_model() -> None:
    def change(document: Document) -> None:
        document["launch"]["model"]["revision"] = digest_of("tuned")
        document["weights"]["recovery"]["revision"] = digest_of("tuned")

    ((field, before, after),) = only(compare(change), "model")
    assert field == "launch.model.revision"
    assert digest_of("model") in before
    assert digest_of("tuned") in after


def test_the_launch_and_its_placement_are_told_apart() -> None:
    def change(document: Document) -> None:
        unit = document["launch"]["units"][0]
        unit["host"] = "node-9"
        unit["command"] = ["python", "-m", "engine", "--port", "9000"]
        unit["mounts"][0]["source"] = "/data/models"
        unit["environment"]["NCCL_DEBUG"] = "INFO"

    found = only(compare(change), "placement")
    assert found == [
        ("launch.units[0].host", '"node-0"', '"node-9"'),
        ("launch.units[0].mounts[0].source", '"/srv/models"', '"/data/models"'),
        ("launch.units[0].command --port", '"8000"', '"9000"'),
        ("launch.units[0].environment.NCCL_DEBUG", "unset", '"INFO"'),
    ]

    def identity(document: Document) -> None:
        unit = document["launch"]["units"][0]
        unit["command"] = ["python", "-m", "engine", "--port=8000", "--threads", "4"]
        unit["environment"]["API_TOKEN"] = "abc"

    lines = only(compare(identity), "launch")
    assert lines == [
        ("launch.units[0].command", "nothing", '"--threads 4"'),
        ("launch.units[0].environment.API_TOKEN", "unset", '"(not shown)"'),
    ]


def test_the_machine_and_its_processor() -> None:
    def change(document: Document) -> None:
        document["compatibility"]["units"][0]["kernel"] = "6.18.1"
        binding(document, "cpu")["flags"] = ["avx2", "amx"]

    assert only(compare(change), "compatibility") == [
        ("compatibility.units.u0.kernel", '"6.12.0"', '"6.18.1"'),
        ("compatibility.units.u0.cpu_flags", "also fma", "also amx"),
    ]


def test_features() -> None:
    def change(document: Document) -> None:
        document["requires"]["features"].append("another")

    assert only(compare(change), "driver") == [("requires.features", "nothing more", "also another")]


@pytest.mark.parametrize(
    ("kind", "section", "field"),
    [("host-files", "host files", "host-files[u0:/lib/x.so]"), ("process-images", "process images", None)],
)
def test_files_by_digest(kind: str, section: str, field: str | None) -> None:
    def change(document: Document) -> None:
        files = binding(document, kind)["files"]
        files[0]["sha256"] = digest_of("changed")
        files.append({"path": files[0]["path"] + "2", "bytes": 1, "sha256": digest_of("new")})

    found = only(compare(change), section)
    assert len(found) == 2
    assert digest_of("changed") in found[0][2]
    assert found[1][1] == "absent"
    assert "1 bytes" in found[1][2]
    if field is not None:
        assert found[0][0] == field


def test_answers() -> None:
    def change(document: Document) -> None:
        binding(document, "acceptance")["answers"] = [
            {"prompt": "p", "max_tokens": 2, "token_ids": [1, 3], "text": "won"},
            {"prompt": "q", "max_tokens": 1, "token_ids": [4], "text": "x"},
        ]

    assert only(compare(change), "acceptance") == [
        ('acceptance["p", 2 tokens]', '"one" [1, 2]', '"won" [1, 3]'),
        ('acceptance["q", 1 tokens]', "absent", '"x" [4]'),
    ]


def test_hygiene() -> None:
    def change(document: Document) -> None:
        binding(document, "hygiene").update(allowed_secrets=["HF_TOKEN"], publishable=False)

    fields = {field for field, _, _ in only(compare(change), "hygiene")}
    assert "hygiene.u0.publishable" in fields


def test_one_of_two_packs() -> None:
    def change(document: Document) -> None:
        entry = document["weights"]["model_payloads"]["objects"][1]
        other = Digest.parse(digest_of("other pack"))
        entry.update(sha256=str(other), path=payload_path(other), bytes=12288)

    sections = compare(change)
    ((field, before, after),) = only(sections, "packs")
    assert field == "weights.model_payloads[w1]"
    assert before.startswith("8192 bytes")
    assert after == f"12288 bytes, {digest_of('other pack')}"
    assert sections["packs"].detail == "1 of 2 packs are shared"
    assert sections["packs"].shared_bytes == 8192


def test_no_packs_at_all_on_one_side() -> None:
    def change(document: Document) -> None:
        del document["weights"]["model_payloads"]
        del document["weights"]["native"]

    assert [one[2] for one in only(compare(change), "packs")] == ["absent", "absent"]


def test_residual_and_why() -> None:
    def change(document: Document) -> None:
        residual = next(one for one in document["capsule"]["objects"] if one["role"] == "residual")
        residual["sha256"] = digest_of("other residual")
        binding(document, "worker-export")["residual_reasons"] = {"padding": 100, "computed": 92}

    fields = [field for field, _, _ in only(compare(change), "residual")]
    assert fields == ["residual[w0]", "residual_reasons.w0.computed", "residual_reasons.w0.padding"]


def test_cache_seeds() -> None:
    def change(document: Document) -> None:
        document["capsule"]["objects"] = [one for one in document["capsule"]["objects"] if one["role"] != "cache-seed"]

    assert only(compare(change), "cache seeds") == [
        ("capsule[u0/cache/k.bin]", f"7 bytes, {digest_of('seed')}", "absent")
    ]
