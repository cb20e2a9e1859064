"""JSON Schema of every document, by name.

A schema says what the shape of a document is; the rules between fields are in the records themselves. Nothing is
imported or built before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from coldsnap.errors import UsageError

__all__ = ["SCHEMAS", "json_schema"]

# name -> where it is: a record, or a function that returns the schema of a document with a parser of its own.
SCHEMAS: Mapping[str, str] = MappingProxyType(
    {
        "request": "coldsnap.core.request:OperationRequest",
        "artifact": "coldsnap.core.artifact:SnapshotArtifact",
        "execution": "coldsnap.core.execution:Execution",
        "native-manifest": "coldsnap.core.manifest:native_manifest_schema",
        "recovery-manifest": "coldsnap.core.manifest:recovery_manifest_schema",
        "validation-record": "coldsnap.core.validation:validation_record_schema",
        "artifact-signature": "coldsnap.core.signature:ArtifactSignature",
        "receipt": "coldsnap.core.receipt:Receipt",
        "timing": "coldsnap.core.spans:Timing",
        "overlay": "coldsnap.core.overlay:OverlayDescriptor",
        "artifact-failures": "coldsnap.core.quarantine:ArtifactFailures",
        "worker-settings": "coldsnap.core.messages:WorkerSettings",
        "binding-process-images": "coldsnap.core.bindings:ProcessImagesBinding",
        "binding-acceptance": "coldsnap.core.bindings:AcceptanceBinding",
        "binding-hygiene": "coldsnap.core.bindings:HygieneBinding",
        "binding-worker-export": "coldsnap.core.bindings:WorkerExportBinding",
        "binding-host-files": "coldsnap.core.bindings:HostFilesBinding",
        "binding-cpu": "coldsnap.core.bindings:CpuBinding",
        "binding-service": "coldsnap.core.bindings:ServiceBinding",
        "binding-fallback": "coldsnap.core.bindings:FallbackBinding",
    }
)


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of the document called ``name``. Raises UsageError that lists the names."""
    if name not in SCHEMAS:
        raise UsageError(f"no document is called {name!r}", cure=f"known names: {', '.join(SCHEMAS)}")
    module, _, attribute = SCHEMAS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    is_record = isinstance(found, type) and issubclass(found, BaseModel)
    schema = found.model_json_schema() if is_record else found()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
