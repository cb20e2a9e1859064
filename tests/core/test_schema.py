"""JSON Schema by name, and what importing the core costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coldsnap.core.schema import SCHEMAS, json_schema
from coldsnap.errors import UsageError
from coldsnap.testing.documents import (
    artifact_example,
    overlay_example,
    receipt_example,
    request_example,
    timing_example,
)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_schema_is_plain_json_and_closed(name: str) -> None:
    schema = json_schema(name)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert len(schema["properties"]) > 1


def test_the_names_that_people_ask_for_are_there() -> None:
    assert {
        "request",
        "artifact",
        "receipt",
        "timing",
        "native-manifest",
        "recovery-manifest",
        "validation-record",
    } <= set(SCHEMAS)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match="request, artifact"):
        json_schema("recipe-book")


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("request", request_example()),
        ("artifact", artifact_example()),
        ("receipt", receipt_example(state="failed")),
        ("timing", timing_example()),
        ("overlay", overlay_example()),
    ],
)
def test_examples_use_the_properties_of_their_schema(name: str, example: dict[str, object]) -> None:
    schema = json_schema(name)
    assert set(example) <= set(schema["properties"])
    assert set(schema.get("required", [])) <= set(example)


def test_a_schema_says_patterns_enumerations_and_defaults() -> None:
    schema = json_schema("request")
    parts = schema["$defs"]
    assert parts["DriverId"]["enum"] == ["n580", "n610", "host"]
    assert parts["Worker"]["properties"]["id"]["pattern"] == "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
    assert parts["Unit"]["properties"]["command"]["minItems"] == 1
    assert parts["Adapter"]["properties"]["schema"]["type"] == "string"
    assert parts["ProcessPolicy"]["properties"]["async_graphs"]["default"] is True
    assert json_schema("artifact")["$defs"]["ObjectRecord"]["properties"]["owner"]["pattern"].startswith("^(unit|")
    assert schema["required"] == ["operation", "id", "snapshot_driver", "launch"]


def test_importing_documents_builds_nothing_and_loads_no_engine() -> None:
    program = """
import sys
import coldsnap.core.artifact, coldsnap.core.request, coldsnap.core.receipt, coldsnap.core.schema
from coldsnap.core.artifact import SnapshotArtifact
assert not SnapshotArtifact.__pydantic_complete__, "the schema was built at import"
assert "coldsnap.core.salvage" not in sys.modules
heavy = {"torch", "numpy", "transformers", "yaml", "rich", "typer", "zstandard", "asyncio"} & set(sys.modules)
print(sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
