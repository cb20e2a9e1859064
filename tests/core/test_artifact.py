"""The snapshot artifact: every agreement between its parts, and the typed bindings inside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from coldsnap.core.artifact import (
    SnapshotArtifact,
    artifact_bytes,
    artifact_document,
    artifact_from,
    parse_artifact,
    payload_path,
)
from coldsnap.core.bindings import (
    Severity,
    acceptance_of,
    cpu_of,
    host_files_of,
    hygiene_of,
    process_images_of,
    service_name_of,
    worker_exports_of,
)
from coldsnap.core.digest import Digest
from coldsnap.errors import InvalidDocument
from coldsnap.testing.documents import artifact_example, digest_of

Document = dict[str, Any]
Change = Callable[[Document], object]


def fields(document: Document) -> list[str]:
    try:
        artifact_from(document)
    except InvalidDocument as error:
        found = error.problems
    else:
        return []
    assert all(problem.cure for problem in found), found
    return [problem.field for problem in found]


def edit(change: Change, **example: Any) -> Document:
    document = copy.deepcopy(artifact_example(**example))
    change(document)
    return document


@pytest.mark.parametrize("driver", ["host", "n580", "n610"])
@pytest.mark.parametrize(("num_units", "workers_per_unit"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_examples_are_read_and_written_back(driver: str, num_units: int, workers_per_unit: int) -> None:
    document = artifact_example(driver=driver, num_units=num_units, workers_per_unit=workers_per_unit)
    artifact = artifact_from(document)
    assert parse_artifact(artifact_bytes(artifact)) == artifact
    assert artifact_from(artifact_document(artifact)) == artifact


def test_packs_shared_by_two_workers_are_one_object() -> None:
    artifact = artifact_from(artifact_example(workers_per_unit=2))
    assert artifact.weights.model_payloads is not None
    assert {entry.path for entry in artifact.weights.model_payloads.objects} == {payload_path(Digest.of(b"pack"))}
    assert [str(entry.owner) for entry in artifact.weights.model_payloads.objects] == ["worker/w0", "worker/w1"]


def test_an_artifact_without_packs_is_good() -> None:
    def change(document: Document) -> None:
        document["weights"].pop("native")
        document["weights"].pop("model_payloads")

    assert fields(edit(change)) == []


def payload(document: Document) -> Document:
    return document["weights"]["model_payloads"]["objects"][0]  # type: ignore[no-any-return] # plain values


def image(document: Document) -> Document:
    return document["capsule"]["images"][0]  # type: ignore[no-any-return] # plain values


def unit(document: Document) -> Document:
    return document["compatibility"]["units"][0]  # type: ignore[no-any-return] # plain values


def recovery(document: Document) -> Document:
    return document["weights"]["recovery"]  # type: ignore[no-any-return] # plain values


def objects(document: Document) -> list[Document]:
    return document["capsule"]["objects"]  # type: ignore[no-any-return] # plain values


HEX = "0" * 64
BROKEN: list[tuple[str, Change, list[str]]] = [
    ("format", lambda d: d.update(format=4), ["format"]),
    ("kind", lambda d: d.update(kind="x"), ["kind"]),
    ("state", lambda d: d.update(state="staged"), ["state"]),
    ("no format", lambda d: d.pop("format"), ["format"]),
    ("no kind", lambda d: d.pop("kind"), ["kind"]),
    ("no state", lambda d: d.pop("state"), ["state"]),
    ("no recovery", lambda d: d["weights"].pop("recovery"), ["weights.recovery"]),
    ("request digest", lambda d: d.update(request_sha256=HEX), ["request_sha256"]),
    ("capture id", lambda d: d.update(capture_id="a/b"), ["capture_id"]),
    ("abi", lambda d: d["snapshot_driver"].update(abi="host-2"), ["snapshot_driver.abi"]),
    (
        "boundary",
        lambda d: d["snapshot_driver"].update(capture_boundary="initialized-cuda-process-state"),
        ["snapshot_driver.capture_boundary"],
    ),
    (
        "minimum",
        lambda d: d["snapshot_driver"].update(minimum_nvidia_driver_major=580),
        ["snapshot_driver.minimum_nvidia_driver_major"],
    ),
    ("base", lambda d: d["snapshot_driver"].update(base_requirements=[]), ["snapshot_driver.base_requirements"]),
    ("features lack the base", lambda d: d["requires"].update(features=["other"]), ["requires.features"]),
    ("feature twice", lambda d: d["requires"]["features"].append("criu-process-tree"), ["requires.features[1]"]),
    ("launch is broken", lambda d: d["launch"]["units"][0].update(index=3), ["launch.units[0].index"]),
    (
        "host worker with a device",
        lambda d: (
            d["launch"]["units"][0].update(devices=["GPU-0"])
            or d["launch"]["execution"]["workers"][0].update(device_slots=[0])
            or unit(d).update(devices=[{"slot": 0, "gpu_name": "g", "compute_capability": "9.0"}])
        ),
        ["launch.execution.workers[0].device_slots"],
    ),
    ("policy name", lambda d: d["compatibility"].update(policy="guess"), ["compatibility.policy"]),
    ("no unit entries", lambda d: d["compatibility"].update(units=[]), ["compatibility.units"]),
    (
        "entry of another unit",
        lambda d: unit(d).update(unit="u9"),
        ["compatibility.units", "compatibility.units[0].unit"],
    ),
    ("entry twice", lambda d: d["compatibility"]["units"].append(unit(d)), ["compatibility.units[1].unit"]),
    (
        "a device too many",
        lambda d: unit(d).update(devices=[{"slot": 0, "gpu_name": "g", "compute_capability": "9.0"}]),
        ["compatibility.units[0].devices"],
    ),
    ("nvidia facts for host", lambda d: unit(d).update(cuda_userspace="13"), ["compatibility.units[0].cuda_userspace"]),
    ("no image", lambda d: d["capsule"].update(images=[]), ["capsule.images"]),
    ("image of another unit", lambda d: image(d).update(unit="u9"), ["capsule.images", "capsule.images[0].unit"]),
    ("image twice", lambda d: d["capsule"]["images"].append(image(d)), ["capsule.images[1].unit"]),
    ("mutable reference", lambda d: image(d).update(reference="u0:latest"), ["capsule.images[0].reference"]),
    (
        "reference of another digest",
        lambda d: image(d).update(reference=f"u0@{digest_of('x')}"),
        ["capsule.images[0].reference"],
    ),
    (
        "image of another driver",
        lambda d: image(d).update(snapshot_driver="n610"),
        ["capsule.images[0].snapshot_driver"],
    ),
    ("owner of no kind", lambda d: objects(d)[1].update(owner="w0"), ["capsule.objects[1].owner"]),
    ("owner that is not there", lambda d: objects(d)[1].update(owner="group/g"), ["capsule.objects[1].owner"]),
    ("unclean path", lambda d: objects(d)[1].update(path="a/../b"), ["capsule.objects[1].path"]),
    ("absolute path", lambda d: objects(d)[1].update(path="/b"), ["capsule.objects[1].path"]),
    ("path twice", lambda d: objects(d)[1].update(path=objects(d)[0]["path"]), ["capsule.objects[1].path"]),
    ("negative size", lambda d: objects(d)[1].update(bytes=-1), ["capsule.objects[1].bytes"]),
    ("pack in the capsule", lambda d: objects(d)[1].update(role="model-weight-payload"), ["capsule.objects[1]"]),
    ("pack path in the capsule", lambda d: objects(d)[1].update(path="model-payloads/x"), ["capsule.objects[1]"]),
    ("graph policy", lambda d: d["graph"].update(policy="preserve-exec"), ["graph.policy"]),
    ("pack path", lambda d: payload(d).update(path="packs/a.pack"), ["weights.model_payloads.objects[0].path"]),
    (
        "pack path of another digest",
        lambda d: payload(d).update(path=f"model-payloads/sha256/{HEX}.pack"),
        ["weights.model_payloads.objects[0].path"],
    ),
    ("pack role", lambda d: payload(d).update(role="residual"), ["weights.model_payloads.objects[0].role"]),
    (
        "pack of a unit",
        lambda d: payload(d).update(owner="unit/u0"),
        ["weights.model_payloads.objects", "weights.model_payloads.objects[0].owner"],
    ),
    (
        "pack of nobody",
        lambda d: payload(d).update(owner="worker/w9"),
        ["weights.model_payloads.objects", "weights.model_payloads.objects[0].owner"],
    ),
    (
        "two packs of one worker",
        lambda d: d["weights"]["model_payloads"]["objects"].append(payload(d)),
        ["weights.model_payloads.objects[1].owner"],
    ),
    (
        "repository without a revision",
        lambda d: d["weights"]["model_payloads"].update(repository="a/b"),
        ["weights.model_payloads.revision"],
    ),
    ("native without packs", lambda d: d["weights"].pop("model_payloads"), ["weights.native"]),
    (
        "native of another driver",
        lambda d: d["weights"]["native"].update(snapshot_driver="n580"),
        ["weights.native.snapshot_driver"],
    ),
    ("another model", lambda d: recovery(d).update(model_id="other"), ["weights.recovery.model_id"]),
    ("another revision", lambda d: recovery(d).update(revision="other"), ["weights.recovery.revision"]),
    (
        "recovery of another driver",
        lambda d: recovery(d).update(snapshot_driver="n580"),
        ["weights.recovery.snapshot_driver"],
    ),
    ("no replay plan", lambda d: recovery(d).update(replay_plan=[]), ["weights.recovery.replay_plan"]),
    (
        "replay plan outside the capsule",
        lambda d: recovery(d)["replay_plan"][0].update(path="elsewhere"),
        ["weights.recovery.replay_plan[0]"],
    ),
    (
        "replay plan with another digest",
        lambda d: recovery(d).update(replay_plan=[{**objects(d)[0], "sha256": digest_of("x")}]),
        ["weights.recovery.replay_plan[0]"],
    ),
    ("health path", lambda d: d["acceptance"].update(health_path="h"), ["acceptance.health_path"]),
]


@pytest.mark.parametrize(("change", "expected"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_disagreement_is_refused_where_it_is(change: Change, expected: list[str]) -> None:
    assert sorted(fields(edit(change))) == sorted(expected)


def test_two_workers_need_two_packs_and_two_plans() -> None:
    def change(document: Document) -> None:
        document["weights"]["model_payloads"]["objects"].pop()
        recovery(document)["replay_plan"].pop()

    assert fields(edit(change, workers_per_unit=2)) == [
        "weights.model_payloads.objects",
        "weights.recovery.replay_plan",
    ]


@pytest.mark.parametrize("digits", [20, 400, 4299])
def test_no_size_is_beyond_what_a_file_can_have(digits: int) -> None:
    """Sums and shares of sizes are shown to people; a number of hundreds of digits is none that they can be made of."""
    document = artifact_example()
    for size, fits in ((2**63 - 1, True), (2**63, False), (10**digits, False)):
        payload(document)["bytes"] = size
        assert fields(document) == ([] if fits else ["weights.model_payloads.objects[0].bytes"])


def test_a_long_value_is_shown_short() -> None:
    long = "x" * 100_000
    document = artifact_example()
    payload(document)["sha256"] = image(document)["digest"] = long
    document["weights"]["model_payloads"] |= {"repository": "", "revision": long}
    recovery(document)["revision"] = document["launch"]["model"]["revision"] = long
    with pytest.raises(InvalidDocument) as caught:
        artifact_from(document)
    assert {problem.field.rpartition(".")[2] for problem in caught.value.problems} >= {"sha256", "digest", "revision"}
    assert all(len(str(problem)) < 1000 for problem in caught.value.problems)


def test_one_pack_has_one_size() -> None:
    document = edit(lambda d: payload(d).update(bytes=1), workers_per_unit=2)
    assert fields(document) == ["weights.model_payloads.objects[1].bytes"]


def test_only_packs_may_share_a_path_and_units_may_not() -> None:
    def change(document: Document) -> None:
        for entry in objects(document):
            entry["path"] = "native-manifest.json" if entry["role"] == "native-manifest" else entry["path"]

    assert fields(edit(change, num_units=2)) == ["capsule.objects[3].path"]


def test_communicating_workers_require_more_features() -> None:
    assert fields(
        edit(
            lambda d: d["requires"].update(features=d["snapshot_driver"]["base_requirements"]),
            driver="n610",
            workers_per_unit=2,
        )
    ) == ["requires.features"]
    assert (
        fields(
            edit(
                lambda d: d["requires"].update(features=d["snapshot_driver"]["base_requirements"]),
                driver="n610",
                num_units=2,
            )
        )
        == []
    )
    assert fields(edit(lambda d: d["requires"]["features"].append("one-more"), driver="n610")) == []


GPU_BROKEN: list[tuple[str, Change, list[str]]] = [
    ("no driver", lambda d: unit(d).pop("nvidia_driver_captured"), ["compatibility.units[0].nvidia_driver_captured"]),
    ("no minimum", lambda d: unit(d).pop("nvidia_driver_min"), ["compatibility.units[0].nvidia_driver_min"]),
    ("no userspace", lambda d: unit(d).pop("cuda_userspace"), ["compatibility.units[0].cuda_userspace"]),
    ("no version", lambda d: unit(d).update(nvidia_driver_min="new"), ["compatibility.units[0].nvidia_driver_min"]),
    (
        "minimum above the captured",
        lambda d: unit(d).update(nvidia_driver_min="580.160"),
        ["compatibility.units[0].nvidia_driver_min"],
    ),
    (
        "minimum below the contract",
        lambda d: unit(d).update(nvidia_driver_min="579.99"),
        ["compatibility.units[0].nvidia_driver_min"],
    ),
    ("slots", lambda d: unit(d)["devices"][0].update(slot=1), ["compatibility.units[0].devices[0].slot"]),
    ("devices", lambda d: unit(d).update(devices=[]), ["compatibility.units[0].devices"]),
    (
        "gpu worker without a device",
        lambda d: d["launch"]["execution"]["workers"][0].update(device_slots=[]),
        ["launch.execution.workers[0].device_slots"],
    ),
]


@pytest.mark.parametrize(("change", "expected"), [c[1:] for c in GPU_BROKEN], ids=[c[0] for c in GPU_BROKEN])
def test_what_a_gpu_driver_demands(change: Change, expected: list[str]) -> None:
    assert fields(edit(change, driver="n610")) == expected


# ---- bindings --------------------------------------------------------------------------------------------------


def with_bindings(*bindings: Document) -> SnapshotArtifact:
    return artifact_from(edit(lambda d: d["runtime"].update(bindings=list(bindings))))


IMAGES = {
    "kind": "coldsnap-process-images",
    "unit": "u0",
    "files": [{"path": "images/pages-1.img", "bytes": 4096, "sha256": digest_of("pages")}],
}
ACCEPTANCE = {
    "kind": "coldsnap-acceptance",
    "answers": [{"prompt": "1 2", "max_tokens": 2, "token_ids": [3, 4], "text": " 3 4"}],
}
HYGIENE = {
    "kind": "coldsnap-hygiene",
    "unit": "u0",
    "findings": [{"kind": "secret", "severity": "warn", "subject": "HF_TOKEN", "message": "is in the image"}],
    "allowed_secrets": ["HF_TOKEN"],
    "publishable": False,
}
EXPORT = {
    "kind": "coldsnap-worker-export",
    "worker": "w0",
    "model_bytes": 10,
    "residual_bytes": 2,
    "residual_reasons": {"unobserved": 2},
}
FILES = {"kind": "coldsnap-host-files", "unit": "u0", "files": [{"path": "/lib/libc.so.6", "bytes": 1}]}
CPU = {"kind": "coldsnap-cpu", "unit": "u0", "flags": ["avx2"]}


def test_bindings_are_read_by_kind() -> None:
    foreign = {"kind": "org.example.note", "deep": {"null": None, "list": [1.5]}}
    bindings = with_bindings(IMAGES, foreign, ACCEPTANCE, HYGIENE, EXPORT, FILES, CPU).runtime.bindings
    assert process_images_of(bindings)[0].files[0].sha256 == Digest.of(b"pages")
    acceptance = acceptance_of(bindings)
    assert acceptance is not None
    assert acceptance.answers[0].token_ids == (3, 4)
    (hygiene,) = hygiene_of(bindings)
    assert hygiene.findings[0].severity is Severity.WARN
    assert not hygiene.publishable
    assert worker_exports_of(bindings)[0].residual_reasons == {"unobserved": 2}
    assert host_files_of(bindings)[0].files[0].path == "/lib/libc.so.6"
    assert cpu_of(bindings)[0].flags == ("avx2",)
    assert bindings[1] == foreign


def test_the_services_name_is_bound_once() -> None:
    service = {"kind": "coldsnap-service", "name": "smollm2"}
    assert service_name_of(with_bindings(service).runtime.bindings) == "smollm2"
    assert service_name_of(with_bindings().runtime.bindings) is None
    assert fields(edit(lambda d: d["runtime"].update(bindings=[service, service]))) == ["runtime.bindings[1].kind"]
    assert fields(edit(lambda d: d["runtime"].update(bindings=[{**service, "name": "a b"}]))) == [
        "runtime.bindings[0].name"
    ]


def test_an_artifact_without_bindings_has_none_to_read() -> None:
    bindings = with_bindings().runtime.bindings
    assert acceptance_of(bindings) is None
    assert not process_images_of(bindings)
    assert not hygiene_of(bindings)
    assert not cpu_of(bindings)


@pytest.mark.parametrize(
    ("bindings", "expected"),
    [
        ([{}], ["runtime.bindings[0].kind"]),
        ([{"kind": "a b"}], ["runtime.bindings[0].kind"]),
        ([{"kind": 5}], ["runtime.bindings[0].kind"]),
        ([5], ["runtime.bindings[0]"]),
        ([{**IMAGES, "unit": "u9"}], ["runtime.bindings[0].unit"]),
        ([{**IMAGES, "unit": 9}], ["runtime.bindings[0].unit"]),
        ([IMAGES, IMAGES], ["runtime.bindings[1].kind"]),
        ([ACCEPTANCE, ACCEPTANCE], ["runtime.bindings[1].kind"]),
        (
            [{**ACCEPTANCE, "answers": [{"prompt": "1 2", "max_tokens": 4097, "token_ids": [3, 4], "text": " 3 4"}]}],
            ["runtime.bindings[0].answers[0].max_tokens"],  # no engine is asked for more
        ),
        ([{**IMAGES, "files": IMAGES["files"] * 2}], ["runtime.bindings[0].files[1].path"]),  # type: ignore[operator]
        (
            [{**IMAGES, "files": [{"path": "/a", "bytes": "1"}]}],
            [
                "runtime.bindings[0].files[0].path",
                "runtime.bindings[0].files[0].bytes",
                "runtime.bindings[0].files[0].sha256",
            ],
        ),
        ([{**HYGIENE, "publishable": True}], ["runtime.bindings[0].publishable"]),
        (
            [{**HYGIENE, "findings": [{}]}],
            [
                "runtime.bindings[0].findings[0].kind",
                "runtime.bindings[0].findings[0].severity",
                "runtime.bindings[0].findings[0].subject",
                "runtime.bindings[0].findings[0].message",
            ],
        ),
        ([{**EXPORT, "worker": "w9"}], ["runtime.bindings[0].worker"]),
        ([EXPORT, EXPORT], ["runtime.bindings[1].kind"]),
        ([{**FILES, "files": [{"path": "lib", "bytes": 1}]}], ["runtime.bindings[0].files[0].path"]),
        ([{**FILES, "files": FILES["files"] * 2}], ["runtime.bindings[0].files[1].path"]),  # type: ignore[operator]
        ([{**CPU, "flags": [""]}], ["runtime.bindings[0].flags[0]"]),
        ([{**CPU, "more": 1}], ["runtime.bindings[0].more"]),
    ],
)
def test_a_broken_binding_of_ours_is_refused_where_it_is_broken(bindings: list[Any], expected: list[str]) -> None:
    assert fields(edit(lambda d: d["runtime"].update(bindings=bindings))) == expected


def test_reading_a_broken_binding_is_an_error_too() -> None:
    with pytest.raises(InvalidDocument, match="coldsnap-cpu"):
        cpu_of([{"kind": "coldsnap-cpu"}])
