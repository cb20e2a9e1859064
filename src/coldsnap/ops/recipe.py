"""A recipe: the short, human file that says what to capture. ``planning.py`` makes it a full request.

    name: smollm2
    engine: transformers
    model: ./smollm2                  # a folder, or a Hugging Face id with `revision`
    driver: auto                      # auto | host | n580 | n610
    python: ./venv/bin/python         # the interpreter that has the engine; coldsnap's own by default
    devices: ["0"]                    # GPUs by index or UUID; the first ones by default
    serve: {host: 127.0.0.1, port: 8000}
    validation:
      prompts:
        - The capital of France is
        - {text: "1 2 3 4", max_tokens: 4}
    allow_secrets: []

Every key but ``engine`` and ``model`` has a default, defined here and nowhere else. Unknown keys are
errors, as everywhere.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from coldsnap.core.launch import HOST_IMAGE
from coldsnap.core.messages import Prompt
from coldsnap.core.names import Length
from coldsnap.core.parsing import Record, parse_document
from coldsnap.errors import InvalidDocument, Problem, UserError

__all__ = [
    "DEFAULT_PROMPTS",
    "IMAGE_PYTHON",
    "Recipe",
    "RecipeMount",
    "RecipeValidation",
    "RecipeWeights",
    "load_recipe",
]

MAX_RECIPE_BYTES = 1024 * 1024
MAX_JSON_BYTES = 4 * MAX_RECIPE_BYTES
DEFAULT_MAX_TOKENS = 8
IMAGE_PYTHON = "/usr/bin/python3"
"""The interpreter of a unit with an image, unless its recipe names another."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
DEFAULT_PROMPTS = (
    Prompt(text="The capital of France is", max_tokens=DEFAULT_MAX_TOKENS),
    Prompt(text="def fibonacci(n):", max_tokens=DEFAULT_MAX_TOKENS),
)


def _prompt(value: object) -> object:
    if isinstance(value, str):
        return {"text": value, "max_tokens": DEFAULT_MAX_TOKENS}
    if isinstance(value, dict) and "text" in value:
        return {"max_tokens": DEFAULT_MAX_TOKENS, **value}
    return value


class RecipeMount(Record):
    """A folder of the host bound into the unit."""

    source: str
    target: str
    read_only: bool = True


class RecipeWeights(Record):
    """Where model bytes may come from at restore; the words of ``policy.weights``."""

    mode: Literal["auto", "native", "recovery", "cache-only-auto"] = "auto"
    repository: str | None = None
    revision: str | None = None
    materialize: Literal["off", "async", "required"] | None = None


class RecipeValidation(Record):
    """Prompts whose greedy answers at capture must come back, token for token, at every restore."""

    health_path: str = "/health"
    prompts: Annotated[
        tuple[Annotated[Prompt, BeforeValidator(_prompt)], ...], Field(max_length=64, strict=False), Length(1)
    ] = DEFAULT_PROMPTS


class Recipe(Record):
    """See the module's head."""

    name: str | None = Field(default=None, pattern=_NAME)
    engine: str
    model: str
    revision: str | None = None
    driver: Literal["auto", "host", "n580", "n610"] = "auto"
    devices: tuple[str, ...] = Field(default=(), strict=False)
    serve: dict[str, Any] = Field(default_factory=dict)
    weights: RecipeWeights = RecipeWeights()
    validation: RecipeValidation = RecipeValidation()
    environment: dict[str, str] = Field(default_factory=dict)
    mounts: tuple[RecipeMount, ...] = Field(default=(), strict=False)
    image: str = HOST_IMAGE
    runtime: Literal["native", "docker", "podman"] = "native"
    python: str | None = Field(default=None, pattern="^[/.~]")
    cache_seeds: tuple[str, ...] = Field(default=(), strict=False)
    allow_secrets: tuple[str, ...] = Field(default=(), strict=False)
    cold_start: bool = False
    stage: bool = False


class _UniqueKeys(yaml.SafeLoader):
    """YAML as JSON sees it: one value a key, and no dates out of text."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe; a relative ``model`` folder or mount source is taken from the recipe's own folder.

    Raises UserError when the file cannot be read, InvalidDocument with every problem otherwise.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot read the recipe {path}: {error.strerror}", cure="name a YAML file; docs/recipes.md shows one"
        ) from error
    return parse_recipe(data, subject=str(path), folder=path.parent)


def parse_recipe(data: bytes, *, subject: str, folder: Path) -> Recipe:
    """As ``load_recipe``, from bytes."""
    if len(data) > MAX_RECIPE_BYTES:
        raise InvalidDocument(
            subject,
            [Problem(field="(file)", message=f"a recipe has at most {MAX_RECIPE_BYTES} bytes", value=f"{len(data)}+")],
        )
    try:
        value = yaml.load(data, Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader with two rules more
        text = _as_json(value)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise InvalidDocument(
            subject,
            [Problem(field="(file)", message=f"not a YAML document of plain values: {error}", cure="mend the YAML")],
        ) from error
    recipe = parse_document(Recipe, text.encode(), subject=subject, limit_bytes=MAX_JSON_BYTES)
    name = recipe.name or (Path(subject).stem if subject.endswith((".yaml", ".yml")) else recipe.engine)
    problems = []
    if not re.fullmatch(_NAME, name) and recipe.name is None:
        cure = "write a name: of letters, digits, '.', '_' and '-', or call the file so"
        problems.append(Problem(field="name", message="is the file's, which cannot be a name", value=name, cure=cure))
    model = _expanded("model", recipe.model, problems)
    sources = [_expanded(f"mounts[{index}].source", one.source, problems) for index, one in enumerate(recipe.mounts)]
    python = _expanded("python", recipe.python, problems) if recipe.python is not None else None
    if recipe.image != HOST_IMAGE and recipe.python is not None and not recipe.python.startswith("/"):
        cure = "write the whole path, as it is inside the image"
        problems.append(Problem(field="python", message="is not absolute", value=recipe.python, cure=cure))
    if not recipe.model.strip():
        cure = "name the checkpoint's folder, or a repository of the hub with its revision"
        problems.append(Problem(field="model", message="names nothing", value=repr(recipe.model), cure=cure))
    if "\0" in recipe.model:
        cure = "remove the NUL"
        problems.append(Problem(field="model", message="is a path with a NUL in it", value=recipe.model, cure=cure))
    if problems:
        raise InvalidDocument(subject, problems)
    if not model.is_absolute() and (recipe.model.startswith((".", "~")) or (folder / model).is_dir()):
        model = (folder / model).resolve()
    return recipe.model_copy(
        update={
            "model": str(model) if model.is_absolute() else recipe.model,
            # As it is written: a link to an interpreter is what makes it the one of its environment.
            "python": os.path.normpath(folder.resolve() / python) if python is not None else None,
            "mounts": tuple(
                one.model_copy(update={"source": str((folder / source).resolve())})
                if one.source.startswith((".", "~"))
                else one
                for one, source in zip(recipe.mounts, sources, strict=True)
            ),
            "name": name,
        }
    )


def _expanded(field: str, written: str, problems: list[Problem]) -> Path:
    """A path with a user's home in its place; one that names no user's is added to ``problems``."""
    try:
        return Path(written).expanduser()
    except RuntimeError:
        cure = "write the whole path"
        problems.append(Problem(field=field, message="names no user's home", value=written, cure=cure))
        return Path(written)


def _as_json(value: object) -> str:
    """JSON, cut short by ValueError where aliases of aliases would make a small file a huge document."""
    parts, size = [], 0
    for part in json.JSONEncoder(allow_nan=False).iterencode(value):
        parts.append(part)
        size += len(part)
        if size > MAX_JSON_BYTES:
            raise ValueError(f"its aliases stand for more than {MAX_JSON_BYTES} bytes; write the values out")
    return "".join(parts)
