"""A recipe is YAML as JSON sees it: strict, with every problem at once, and paths relative to its own folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.core.messages import Prompt
from coldsnap.errors import InvalidDocument, UserError
from coldsnap.ops.recipe import DEFAULT_PROMPTS, MAX_RECIPE_BYTES, Recipe, load_recipe, parse_recipe

SMALL = b"engine: fake\nmodel: /models/m\n"


def recipe(text: str | bytes, folder: Path = Path("/recipes"), subject: str = "r.yaml") -> Recipe:
    data = text.encode() if isinstance(text, str) else text
    return parse_recipe(data, subject=subject, folder=folder)


def fields(text: str | bytes) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        recipe(text)
    return [problem.field for problem in caught.value.problems]


def test_two_lines_are_enough() -> None:
    one = recipe(SMALL, subject="/recipes/smollm2.yaml")
    assert (one.name, one.engine, one.model, one.driver) == ("smollm2", "fake", "/models/m", "auto")
    assert one.validation.prompts == DEFAULT_PROMPTS
    assert (one.environment, one.serve, one.allow_secrets, one.cold_start) == ({}, {}, (), False)


def test_a_recipe_that_is_no_file_is_called_like_its_engine() -> None:
    assert recipe(SMALL, subject="-").name == "fake"


def test_prompts_are_text_or_records() -> None:
    one = recipe(
        SMALL + b"validation:\n  prompts:\n    - plain\n    - {text: with, max_tokens: 3}\n    - {text: without}\n"
    )
    assert one.validation.prompts == (
        Prompt(text="plain", max_tokens=8),
        Prompt(text="with", max_tokens=3),
        Prompt(text="without", max_tokens=8),
    )


def test_every_problem_is_reported_at_once() -> None:
    found = fields(
        "engine: 3\nmodle: /m\ndriver: n999\nweights: {mode: sometimes, colour: red}\n"
        "validation: {prompts: [{text: x, max_tokens: 0}]}\nenvironment: {A: 1}\nmounts: [{source: /a}]\n"
    )
    assert set(found) == {
        "engine",
        "modle",
        "model",
        "driver",
        "weights.mode",
        "weights.colour",
        "validation.prompts[0].max_tokens",
        "environment.A",
        "mounts[0].target",
    }


def test_a_broken_prompt_among_plain_ones_is_named_alone() -> None:
    """A plain text is a prompt in this place only; what is left of a broken list must not stumble over it."""
    prompts = "validation: {prompts: [hello, {text: x, max_tokens: 0}, {texd: y, max_tokens: 1}]}\n"
    assert fields(SMALL + prompts.encode()) == [
        "validation.prompts[1].max_tokens",
        "validation.prompts[2].texd",
        "validation.prompts[2].text",
    ]


def test_an_acceptance_without_prompts_is_refused() -> None:
    assert fields(SMALL + b"validation: {prompts: []}\n") == ["validation.prompts"]


@pytest.mark.parametrize("name", ["", "-x", ".x", "a/b", "a b", "x" * 129])
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    assert fields(SMALL + f"name: '{name}'\n".encode()) == ["name"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("engine: a\nengine: b\nmodel: m\n", "'engine' stands twice"),
        ("engine: a\nmodel: m\nserve: {port: 1, port: 2}\n", "'port' stands twice"),
        ("engine: a\nmodel: m\nenvironment: {1: x}\n", "key 1 is not text"),
        ("engine: a\nmodel: m\nenvironment: {true: x}\n", "key True is not text"),
        ("engine: a\nmodel: m\nserve: {x: .nan}\n", "not a YAML document of plain values"),
        ("engine: a\nmodel: m\nserve: {x: .inf}\n", "not a YAML document of plain values"),
        ("engine: a\nmodel: m\nserve: {x: !!set {a}}\n", "not a YAML document of plain values"),
        ("engine: a\nmodel: m\nserve: {x: !!binary aGk=}\n", "not a YAML document of plain values"),
        ("engine: a\nmodel: m\nserve: {x: !!python/object/apply:os.getcwd []}\n", "not a YAML document"),
        ("engine: a\nmodel: m\nserve: &s {x: *s}\n", "not a YAML document"),
        ("engine: [\n", "not a YAML document"),
        ("engine: a\n---\nmodel: m\n", "not a YAML document"),
    ],
)
def test_yaml_that_json_could_not_say_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        recipe(text)
    assert reason in str(caught.value)
    assert "r.yaml" in str(caught.value)


def test_text_that_looks_like_a_date_stays_text() -> None:
    one = recipe(SMALL + b"revision: 2024-01-01\nenvironment: {STARTED: 2024-01-01 10:00:00}\n")
    assert one.revision == "2024-01-01"
    assert one.environment == {"STARTED": "2024-01-01 10:00:00"}


def test_the_norwegian_word_is_not_silently_a_boolean() -> None:
    assert fields(SMALL + b"environment: {COUNTRY: no}\n") == ["environment.COUNTRY"]


def test_a_document_that_is_no_mapping_is_refused() -> None:
    for text in ("", "null", "- engine", "engine"):
        assert fields(text)


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(SMALL + b"#" * MAX_RECIPE_BYTES)
    with pytest.raises(InvalidDocument, match=f"at most {MAX_RECIPE_BYTES} bytes"):
        load_recipe(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the recipe .*absent\.yaml: No such file"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize("written", ["./m", "m", "sub/../m"])
def test_a_relative_model_is_relative_to_the_recipe(tmp_path: Path, written: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "sub").mkdir()
    file = tmp_path / "r.yaml"
    file.write_text(f"engine: fake\nmodel: {written}\n")
    assert load_recipe(file).model == str(tmp_path / "m")


def test_a_name_that_is_no_folder_beside_the_recipe_is_left_for_the_hub(tmp_path: Path) -> None:
    assert recipe("engine: fake\nmodel: org/name\n", folder=tmp_path).model == "org/name"


def test_a_folder_that_is_missing_keeps_its_place(tmp_path: Path) -> None:
    assert recipe("engine: fake\nmodel: ./absent\n", folder=tmp_path).model == str(tmp_path / "absent")


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert recipe("engine: fake\nmodel: ~/m\n").model == "/home/somebody/m"


@given(st.binary(max_size=200))
def test_no_bytes_make_anything_but_a_recipe_or_our_error(data: bytes) -> None:
    with contextlib.suppress(InvalidDocument):
        recipe(data)


def test_aliases_of_aliases_are_no_way_to_a_huge_document() -> None:
    """Twelve lists of nine stand for 9^12 texts: hours and all the memory, if they were written out."""
    lists = "".join(f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'x'] * 9)}]\n" for i in range(12))
    with pytest.raises(InvalidDocument, match="aliases stand for more than"):
        recipe(SMALL + b"serve:\n" + lists.encode())


def test_a_few_aliases_are_fine() -> None:
    assert recipe(SMALL + b"serve: {a: &a [1], b: *a}\n").serve == {"a": [1], "b": [1]}


@pytest.mark.parametrize("model", ["", "  ", "~nobody-is-called-so/m", r"./\0m", r"/m\0"])
def test_a_model_path_that_cannot_be_one_is_named(model: str) -> None:
    assert fields(f'engine: fake\nmodel: "{model}"\n') == ["model"]


@pytest.mark.parametrize("file", ["my recipe.yaml", "ünï.yaml", ".yaml", "-x.yml"])
def test_a_file_name_that_cannot_be_a_service_s_is_refused_by_that_word(file: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        recipe(SMALL, subject=f"/recipes/{file}")
    assert [problem.field for problem in caught.value.problems] == ["name"]
    assert recipe(SMALL + b"name: fine\n", subject=f"/recipes/{file}").name == "fine"


@pytest.mark.parametrize("written", ["./models", "../r/models"])
def test_a_relative_source_of_a_mount_is_relative_to_the_recipe(tmp_path: Path, written: str) -> None:
    (tmp_path / "r").mkdir()
    text = f"engine: fake\nmodel: /m/x\nmounts: [{{source: {written}, target: /m}}, {{source: /srv, target: /s}}]\n"
    mounts = recipe(text, folder=tmp_path / "r").mounts
    assert [one.source for one in mounts] == [str(tmp_path / "r/models"), "/srv"]


def test_a_source_in_nobodys_home_is_named() -> None:
    with pytest.raises(InvalidDocument) as caught:
        recipe("engine: fake\nmodel: /m/x\nmounts: [{source: ~nobody-at-all/x, target: /m}]\n")
    assert [problem.field for problem in caught.value.problems] == ["mounts[0].source"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("/opt/venv/bin/python", "/opt/venv/bin/python"),
        ("./venv/bin/python", "/recipes/venv/bin/python"),
        ("../venv/bin/python", "/venv/bin/python"),
    ],
)
def test_an_interpreter_is_named_from_the_recipes_own_folder(said: str, meant: str) -> None:
    assert recipe(SMALL + f"python: {said}\n".encode()).python == meant
    assert recipe(SMALL).python is None


def test_a_link_to_an_interpreter_stays_one(tmp_path: Path) -> None:
    """It is what makes Python use the packages of its environment."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to("/usr/bin/env")
    assert recipe(SMALL + b"python: ./venv/bin/python\n", folder=tmp_path).python == str(tmp_path / "venv/bin/python")


@pytest.mark.parametrize("said", ["python3", "venv/bin/python", "''"])
def test_an_interpreter_is_a_path(said: str) -> None:
    assert fields(SMALL + f"python: {said}\n".encode()) == ["python"]


def test_the_interpreter_of_an_image_is_absolute() -> None:
    image = "image: example.com/x@sha256:" + "0" * 64 + "\n"
    assert fields(SMALL + image.encode() + b"python: ./venv/bin/python\n") == ["python"]
