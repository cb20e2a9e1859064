"""Are the symbols that we rely on in this vLLM? Answered from its source text alone: nothing of it is imported.

    python -m coldsnap.engines.vllm.contract FOLDER

FOLDER holds the package `vllm`: an unpacked wheel, or a site-packages folder. Prints what is gone, one a line, and
exits with 1; or says that all is there. A name counts as there when the module defines, assigns or imports it
anywhere but in a function; a member, when its class or a class it is derived from defines or assigns it, or assigns
`self.NAME` in a method. Imports from vllm itself are followed to what they mean.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from coldsnap.engines.vllm.symbols import SYMBOLS, Found, Lookup, missing
from coldsnap.errors import UserError

__all__ = ["lookup_in", "main"]

_MAX_DEPTH = 12  # of imports and base classes; deeper is a circle
_Named: TypeAlias = "tuple[str, ast.AST]"


def lookup_in(folder: Path) -> Lookup:
    """Finds symbols in the sources below `folder`. Raises UserError when there is no `vllm`.

    What it returns raises UserError for a source file that cannot be read or parsed, naming it.
    """
    if not (folder / "vllm/__init__.py").is_file():
        raise UserError(
            f"there is no package vllm in {folder}", cure="name the folder that holds vllm/__init__.py and the rest"
        )

    @cache
    def module(name: str) -> dict[str, ast.AST] | None:
        path = folder.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not path.is_file():
            return None
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(f"cannot read {path}: {error}", cure="unpack vLLM again, or use a newer Python") from error
        return dict(_names(tree.body))

    def find(where: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        """The module that defines it and its definition; an import that leaves vllm is its own definition."""
        node = (module(where) or {}).get(name)
        if not isinstance(node, ast.ImportFrom) or depth > _MAX_DEPTH:
            return (where, node) if node is not None else None
        origin, real = _imported(where, node, name)
        return find(origin, real, depth + 1) if origin.startswith("vllm.") else (where, node)

    def member(where: str, node: ast.AST, name: str, depth: int = 0) -> ast.AST | None:
        if not isinstance(node, ast.ClassDef) or depth > _MAX_DEPTH:
            return None
        own = dict(_members(node))
        if name in own:
            return own[name]
        for base in node.bases:
            found = find(where, base.id) if isinstance(base, ast.Name) else None
            inherited = member(*found, name, depth + 1) if found is not None else None
            if inherited is not None:
                return inherited
        return None

    def lookup(where: str, name: str) -> Found | None:
        owner, _, inner = name.partition(".")
        found = find(where, owner)
        if found is None:
            return None
        node = member(*found, inner) if inner else found[1]
        return Found(parameters=_parameters(node)) if node is not None else None

    return lookup


def main(words: Sequence[str]) -> int:
    """Compare one folder. Exit status: 0 all there, 1 something is gone, 2 wrong words or no vllm."""
    if len(words) != 1 or words[0].startswith("-"):
        sys.stderr.write("usage: python -m coldsnap.engines.vllm.contract FOLDER\n")
        return 2
    folder = Path(words[0])
    try:
        gone = missing(lookup_in(folder))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if gone:
        sys.stdout.write(f"{len(gone)} of {len(SYMBOLS)} symbols of vLLM that coldsnap relies on are gone:\n")
        sys.stdout.writelines(f"  {one}\n" for one in gone)
        return 1
    sys.stdout.write(f"all {len(SYMBOLS)} symbols of vLLM that coldsnap relies on are in {folder}\n")
    return 0


def _imported(where: str, node: ast.ImportFrom, name: str) -> tuple[str, str]:
    """The module and the name there that `name` stands for."""
    origin = node.module or ""
    if node.level:  # a package's __init__ would need one level less; vLLM imports by full names
        parent = where.split(".")[: -node.level]
        origin = ".".join([*parent, origin] if origin else parent)
    real = next(one.name for one in node.names if (one.asname or one.name) == name)
    return origin, real


def _names(body: Iterable[ast.stmt]) -> Iterator[_Named]:
    """What statements bind outside functions, also under `if` and `try`; the first definition of a name wins."""
    found: dict[str, ast.AST] = {}
    for statement in _flat(body):
        for name, node in _bound(statement):
            found.setdefault(name, node)
    yield from found.items()


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _flat(statement.body)
            yield from _flat(getattr(statement, "orelse", ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _flat(handler.body)
        else:
            yield statement


def _bound(statement: ast.stmt) -> Iterator[_Named]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name, statement
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name, statement
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Name):
                    yield one.id, statement


def _members(node: ast.ClassDef) -> Iterator[_Named]:
    found = dict(_names(node.body))
    for method in [one for one in _flat(node.body) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        for inner in ast.walk(method):
            targets = inner.targets if isinstance(inner, ast.Assign) else []
            if isinstance(inner, ast.AnnAssign):
                targets = [inner.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.setdefault(target.attr, inner)
    yield from found.items()


def _parameters(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.args.kwarg is not None:
        return None
    return tuple(one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
