"""The names and parameters of vLLM's allocator that the fake has, and how they are read from vLLM's source.

By hand, for an unpacked release:

    python tests/engines/vllm/memory/cumem_names.py SITE_PACKAGES 0.33
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

Names = Mapping[str, tuple[str, ...]]

_CLASS = "CuMemAllocator"
COMMON: Names = {
    "AllocationData": ("handle", "tag", "cpu_backup_tensor", "is_asleep"),
    f"{_CLASS}.default_tag": (),
    f"{_CLASS}._python_malloc_callback": ("allocation_handle",),
    f"{_CLASS}._python_free_callback": ("ptr",),
    f"{_CLASS}.sleep": ("offload_tags",),
    f"{_CLASS}.wake_up": ("tags",),
    f"{_CLASS}.use_memory_pool": ("tag",),
    f"{_CLASS}.get_current_usage": (),
    f"{_CLASS}.self": ("allocator_and_pools", "current_tag", "pointer_to_data"),
    "create_and_map": ("allocation_handle",),
    "unmap_and_release": ("allocation_handle",),
    "cumem_available": (),
}
"""A function's parameters, a data class's fields, and below `self` what `__init__` sets."""

EXPECTED: Mapping[str, Names] = {
    "0.26": COMMON,
    "0.33": {**COMMON, f"{_CLASS}.discard": ("tags",), f"{_CLASS}._trim": ("pool",)},
}


def names_in(folder: Path) -> Names:
    """All such names in `vllm/device_allocator` below `folder`."""
    found: dict[str, tuple[str, ...]] = {}
    for name in ("__init__.py", "cumem.py"):
        tree = ast.parse((folder / "vllm" / "device_allocator" / name).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.update(_class(node))
            else:
                found.update(_plain(node, ""))
    return found


def differences(expected: Names, found: Names) -> list[str]:
    """What of `expected` is gone or takes other parameters; what `found` has beside it is its own business."""
    lines = []
    for name, parameters in expected.items():
        there = found.get(name)
        if there is None:
            lines.append(f"{name} is gone")
        elif name.endswith(".self") and not set(parameters) <= set(there):
            lines.append(f"{name} lacks {sorted(set(parameters) - set(there))}")
        elif not name.endswith(".self") and there != parameters:
            lines.append(f"{name} takes {there}, not {parameters}")
    return lines


def _plain(node: ast.stmt, prefix: str) -> dict[str, tuple[str, ...]]:
    if isinstance(node, ast.FunctionDef):
        arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return {prefix + node.name: tuple(one for one in arguments if one != "self")}
    if isinstance(node, ast.Assign):
        return {prefix + one.id: () for one in node.targets if isinstance(one, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {prefix + node.target.id: ()}
    return {}


def _class(node: ast.ClassDef) -> dict[str, tuple[str, ...]]:
    found = {node.name: tuple(name for one in node.body if isinstance(one, ast.AnnAssign) for name in _plain(one, ""))}
    for one in node.body:
        found.update(_plain(one, f"{node.name}."))
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            targets = [
                target
                for step in ast.walk(one)
                for target in (
                    step.targets
                    if isinstance(step, ast.Assign)
                    else [step.target]
                    if isinstance(step, ast.AnnAssign)
                    else []
                )
            ]
            found[f"{node.name}.self"] = tuple(sorted(one.attr for one in targets if isinstance(one, ast.Attribute)))
    return found


if __name__ == "__main__":
    told = differences(EXPECTED[sys.argv[2]], names_in(Path(sys.argv[1])))
    sys.exit("\n".join(told) or None)
