"""The documents say what the code does: commands, options, exit codes, links, recipes, members, messages."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from coldsnap.cli.commands import register
from coldsnap.cli.exits import DIFFERS, EXIT_CODES
from coldsnap.core import messages
from coldsnap.core.artifact import SnapshotArtifact
from coldsnap.core.bindings import OWN_BINDINGS
from coldsnap.core.drivers import DRIVERS
from coldsnap.core.receipt import Receipt
from coldsnap.core.request import Extension, OperationRequest, Policy
from coldsnap.core.spans import Clock, Span, Timing
from coldsnap.engines.transformers.options import TransformersOptions, parse_options
from coldsnap.engines.vllm.options import parse_options as parse_vllm_options
from coldsnap.engines.vllm.outer import PLUGIN
from coldsnap.engines.vllm.refusals import OPTIONS, SLEEP_MODE, VARIABLES, flag
from coldsnap.ops.leases import Lease
from coldsnap.ops.recipe import Recipe, parse_recipe
from coldsnap.ops.services import ServiceRecord

ROOT = Path(__file__).resolve().parents[2]
BOOKS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SCRIPTED = ("run", "scripts", "benchmarks")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows_below(name: str, heading: str) -> list[list[str]]:
    """The cells of the table rows between a heading and the next one of any level."""
    part = re.split(r"^#+ ", f"\n{text_of(name)}".split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@cache
def program() -> typer.core.TyperGroup:
    app = typer.Typer()
    register(app)
    found = typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    return found


@cache
def sources() -> str:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*"), *(ROOT / "benchmarks").glob("*.py")]
    return "\n".join(
        path.read_text(encoding="utf-8") for path in [ROOT / "run", *files] if path.is_file() and path.suffix != ".pyc"
    )


def test_every_command_is_in_the_readme_and_none_more() -> None:
    listed = [re.match(r"`coldsnap ([a-z][a-z-]*)", cells[0]) for cells in rows_below("README.md", "## Commands")]
    assert sorted(match[1] for match in listed if match) == sorted(program().commands)


@pytest.mark.parametrize("book", BOOKS, ids=lambda path: path.name)
def test_every_command_line_names_a_command_and_a_job(book: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    jobs = importlib.import_module("house.jobs").JOBS
    quoted = "\n".join(
        [*re.findall(r"`([^`\n]+)`", book.read_text()), *(m[2] for m in FENCE.finditer(book.read_text()))]
    )
    said = set(re.findall(r"(?:^|\s)coldsnap ([a-z][a-z-]*)", quoted, re.MULTILINE))
    assert said <= set(program().commands)
    assert set(re.findall(r"\./run ([a-z-]+)\b", quoted)) <= set(jobs)


@pytest.mark.parametrize("name", ["README.md", "docs/recipes.md", "docs/troubleshooting.md", "docs/benchmarks.md"])
def test_every_option_exists(name: str) -> None:
    ours = {option for command in program().commands.values() for param in command.params for option in param.opts}
    others = {f'"{option}"' for option in set(re.findall(r"--[a-z][a-z-]+", text_of(name))) - ours - {"--help"}}
    assert {option for option in others if option not in sources()} == set()


def test_exit_codes_are_those_of_the_program() -> None:
    told = {int(code): meaning for code, meaning in rows_below("README.md", "### Exit codes")}
    assert set(told) == {0, DIFFERS, *(code for _, code, _ in EXIT_CODES)}
    for code, meaning in told.items():
        assert code in (0, DIFFERS) or meaning in [text for _, one, text in EXIT_CODES if one == code]


def slug(heading: str) -> str:
    """The anchor a heading gets on the web: lower case, words by hyphens, marks gone."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("book", BOOKS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(book: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", book.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (book.parent / name).resolve() if name else book
        headings = (
            re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if path.suffix == ".md" and path.exists() else []
        )
        if not path.exists() or (anchor and anchor not in map(slug, headings)):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize("book", BOOKS, ids=lambda path: path.name)
def test_every_file_of_the_repository_that_is_named_exists(book: Path) -> None:
    named = re.findall(r"`((?:scripts|docs|tests|src|examples|benchmarks)/[\w./-]+)`", book.read_text())
    assert [name for name in named if not (ROOT / name).exists() and name != "benchmarks/NAME.py"] == []


def recipes() -> list[tuple[str, bytes]]:
    files = [(str(path.relative_to(ROOT)), path.read_bytes()) for path in sorted((ROOT / "examples").glob("*.yaml"))]
    blocks = [
        (f"{book}, block {index}", match[2].encode())
        for book in ("docs/recipes.md", "docs/vllm.md")
        for index, match in enumerate(FENCE.finditer(text_of(book)), 1)
        if match[1] == "yaml"
    ]
    return [*files, *blocks]


@pytest.mark.parametrize(("name", "data"), recipes(), ids=lambda one: one if isinstance(one, str) else "")
def test_every_recipe_shown_is_a_good_one(name: str, data: bytes) -> None:
    recipe = parse_recipe(data, subject=name, folder=ROOT / "examples")
    serve = {key: value for key, value in recipe.serve.items() if key not in ("host", "port")}
    assert recipe.engine in ("transformers", "vllm")
    if recipe.engine == "vllm":
        parse_vllm_options(serve)
    else:
        parse_options(serve)


def test_the_examples_use_the_checkpoints_that_the_jobs_make() -> None:
    made = {"smollm2", "random-0.6b", "random-8b"}
    files = [one for one in recipes() if one[0].startswith("examples/")]
    parsed = [parse_recipe(data, subject=name, folder=ROOT / "examples") for name, data in files]
    assert {Path(on_the_host(recipe)) for recipe in parsed} == {ROOT / ".cache/models" / name for name in made}


def on_the_host(recipe: Recipe) -> str:
    """The model, found through the mount that shows it to the unit."""
    for mount in recipe.mounts:
        if Path(recipe.model).is_relative_to(mount.target):
            return str(Path(mount.source, Path(recipe.model).relative_to(mount.target)))
    return recipe.model


def test_every_key_of_a_recipe_is_described() -> None:
    wanted = set()
    for name, field in Recipe.model_fields.items():
        inner = field.annotation
        if name in ("weights", "validation"):
            assert isinstance(inner, type)
            assert issubclass(inner, BaseModel)
            wanted |= {f"{name}.{key}" for key in inner.model_fields}
        else:
            wanted.add(name)
    assert {cells[0].strip("`") for cells in rows_below("docs/recipes.md", "## Keys")} == wanted


def test_every_option_of_the_engine_is_described() -> None:
    told = {cells[0].strip("`") for cells in rows_below("docs/recipes.md", "## Options of the Transformers engine")}
    assert told == set(TransformersOptions.model_fields)


def test_every_refusal_of_vllm_is_described() -> None:
    told = " ".join(cells[0] for cells in rows_below("docs/vllm.md", "## Refusals"))
    names = {*(flag(one.name) for one in (*OPTIONS, SLEEP_MODE)), *(one.name for one in VARIABLES)}
    assert {name for name in names if f"`{name}`" not in told} == set()
    assert set(re.findall(r"`(--[a-z-]+|[A-Z][A-Z0-9_]+)`", told)) == {
        *names,
        "--enforce-eager",
        "--tensor-parallel-size",
    }, "and no others, but for the two that need a second fact"


def test_the_variables_of_a_vllm_process_are_described() -> None:
    for name, value in PLUGIN.unit_environment(()).items():
        said = text_of("docs/vllm.md")
        assert f"`{name}={value}`" in said or f"`{name}`" in said


def documents() -> str:
    return text_of("docs/format.md").split("\n## Documents\n", 1)[1]


@pytest.mark.parametrize(
    "record",
    [
        OperationRequest,
        Policy,
        Extension,
        SnapshotArtifact,
        Receipt,
        Timing,
        Clock,
        Span,
        Lease,
        ServiceRecord,
        messages.WorkerSettings,
        messages.ExportBody,
        messages.Exported,
        messages.WakeBody,
        messages.WakeReport,
        messages.PlaceBody,
        messages.Placed,
        messages.SleepReport,
        messages.WorkerStatus,
        *OWN_BINDINGS.values(),
    ],
    ids=lambda record: record.__name__,
)
def test_every_member_is_specified(record: type[BaseModel]) -> None:
    names = {field.alias or name for name, field in record.model_fields.items()}
    assert {name for name in names if not re.search(rf"\b{name}\b", documents())} == set()


def test_kinds_states_and_verbs_are_specified() -> None:
    kinds = {model.model_fields["kind"].default for model in (OperationRequest, Receipt, Timing, Lease, ServiceRecord)}
    words = {*kinds, *OWN_BINDINGS, *messages.WorkerState, *messages.Verb}
    assert {word for word in words if f"`{word}`" not in documents()} == set()


def test_the_drivers_are_those_of_the_code() -> None:
    rows = {
        cells[0].strip("`"): cells
        for cells in rows_below("docs/format.md", "### Snapshot artifact")
        if len(cells) == 6 and cells[0] != "driver"
    }
    assert set(rows) == {driver.value for driver in DRIVERS}
    for driver, contract in DRIVERS.items():
        _, abi, boundary, least, base, more = rows[driver.value]
        assert (abi, boundary, least) == (
            f"`{contract.abi}`",
            f"`{contract.capture_boundary}`",
            str(contract.minimum_nvidia_driver_major),
        )
        assert re.findall(r"`([^`]+)`", base) == list(contract.base_features)
        assert re.findall(r"`([^`]+)`", more) == list(contract.communicating_features)


def test_every_refusal_explained_is_one_the_program_makes() -> None:
    headings = re.findall(r"^### `([^`]+)`", text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert len(headings) > 20
    assert [heading for heading in headings if heading not in sources()] == []


def test_every_figure_of_the_demo_is_one_it_prints() -> None:
    cells = [cells[0] for cells in rows_below("docs/benchmarks.md", "## The demo")]
    names = re.findall(r"`(\w+)`", " ".join(cells))
    assert len(names) > 10
    printed = text_of("src/coldsnap/ops/demo.py")
    assert [name for name in names if f'"{name}"' not in printed] == []


def test_fragments_are_named_as_their_readme_says() -> None:
    kinds = {cells[0].strip("`") for cells in rows_below("changelog.d/README.md", "# Changelog fragments")}
    names = [path.name for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md"]
    assert {"added", "fixed"} <= kinds
    assert [name for name in names if not re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(kinds)})\.md", name)] == []
