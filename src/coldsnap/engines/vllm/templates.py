"""What `n580` asks of a vLLM model: that its memory can be laid out, and filled, without a byte of its checkpoint.

A template's copies build the model from the checkpoint's headers. Finalizers run there as ever, on bytes that are not
there yet. So whatever a number of the checkpoint decides, and whatever is made of one outside the memory that is filled
later, would be wrong in a copy and nobody would see it: at capture, all of that is refused by name. Needs neither torch
nor vllm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from coldsnap.core.extents import Allocation, AllocationIndex
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.engines.vllm.sources import dtype_name
from coldsnap.errors import Problem

__all__ = ["template_problems"]

_CURE = "capture this model with another snapshot driver"


def template_problems(
    *,
    files: Sequence[SafetensorsFile],
    told: Iterable[tuple[str, bool]],
    host_reads: Sequence[str],
    allocations: Sequence[Allocation],
    storages: Iterable[tuple[int, int]],
    made_from: Callable[[int, int], str | None],
) -> tuple[Problem, ...]:
    """Why this model cannot be built from the headers `files`; none: it can.

    `told`: the name of each tensor that the loader gave to the model, and whether it was found in a header.
    `host_reads`: the stored tensors of which a number went to the host. `storages`: (ptr, size) of the memory behind
    the model's tensors; `made_from`: the stored tensor that anything there was made from, if any.
    """
    given = Counter(told)
    names = {name for name, _ in given}
    stored = [one for file in files for one in file.tensors]
    strangers = [name for name, is_known in given if not is_known]
    found = [(name, "is not in one header with this shape and number type") for name in strangers]
    found += [(name, "was loaded more than once") for (name, is_known), n in given.items() if is_known and n > 1]
    found += [(one.name, "is in a header, and was not loaded") for one in stored if one.name not in names]
    found += [
        (one.name, f"is of number type {one.dtype}, which torch has not")
        for one in stored
        if dtype_name(one.dtype) is None
    ]
    found += [(name, "decides something while the model is loaded: a number of it was read") for name in host_reads]
    index = AllocationIndex(allocations)
    for ptr, size in storages:
        origin = made_from(ptr, size) if size and index.holding(ptr, size) is None else None
        if origin is not None:
            found.append((origin, f"is also made into {size} bytes that are not among the weights"))
    return tuple(Problem(field=f"checkpoint[{name}]", message=message, cure=_CURE) for name, message in found)
