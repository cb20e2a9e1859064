"""Which options a vLLM has, read from its sources: nothing of it is imported, so a slip is told before anything starts.

Its records' options are `add_argument("--name", ...)` calls in `vllm/engine/arg_utils.py`; the server's are fields of
the classes in the module of its arguments, whose places `symbols` knows, and calls there. Where too few are found to be
all of them, nothing is said: vLLM will.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from coldsnap.engines.vllm.symbols import SYMBOLS

__all__ = ["options_in", "unknown_flags"]

_ENOUGH = 60
_RECORDS = "vllm.engine.arg_utils"


def options_in(folder: Path) -> frozenset[str]:
    """The plain names (underscores) of every option of the vLLM below ``folder``; empty when they cannot be told."""
    places = next(one.places for one in SYMBOLS if one.name == "make_arg_parser")
    found: set[str] = set()
    for module in (_RECORDS, *places):
        try:
            tree = ast.parse(folder.joinpath(*module.split(".")).with_suffix(".py").read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        found.update(_spelled(tree))
        if module != _RECORDS:
            found.update(_fields(tree))
    return frozenset(found) if len(found) >= _ENOUGH else frozenset()


def unknown_flags(folder: Path, options: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each of ``options`` (plain names) that this vLLM does not have, with those that are spelled alike."""
    known = options_in(folder)
    for name in options if known else ():
        plain = name.partition(".")[0]
        if plain not in known and not (plain.startswith("no_") and plain.removeprefix("no_") in known):
            yield name, tuple(get_close_matches(plain, known, n=2))


def _spelled(tree: ast.AST) -> Iterator[str]:
    """Names in calls of `add_argument`, in long form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("--"):
                    yield word.value.removeprefix("--").replace("-", "_")


def _fields(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id
