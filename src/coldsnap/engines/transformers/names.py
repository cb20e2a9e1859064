"""From the checkpoint's tensor names to the model's own: which stored tensor goes where, unchanged.

Transformers renames and sometimes reshapes what it loads (conversion mappings, an added or missing prefix,
precision rules). Everything that reads Transformers' internals about this is in this file. Where it cannot be
sure that a tensor is copied byte for byte, it says so, and the loader takes the long way (`loading`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from coldsnap.engines.safetensors import SafetensorsFile, StoredTensor

__all__ = ["DTYPES", "Assignment", "Match", "match_names", "renamer"]

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_STALE_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Buffers that old checkpoints hold and that models compute themselves now."""

Renamer = Callable[[str], tuple[str, bool]]
"""Stored name -> the model's name for it, and whether the tensor is only renamed on the way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A stored tensor and the name of the parameter or buffer it fills."""

    file: SafetensorsFile
    stored: StoredTensor
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Every stored tensor, sorted into what can be done with it.

    `copies` fill their target byte for byte, `casts` after a change of number type; `parts` may be a slice of their
    target. `repeats` pair a tensor with the earlier one that fills the same target (tied weights stored twice).
    `unknown` needs Transformers' own loader. `unfilled` are parameters and saved buffers that nothing fills. What is
    in none of them is known to be of no use.
    """

    copies: tuple[Assignment, ...]
    casts: tuple[Assignment, ...]
    parts: tuple[Assignment, ...]
    repeats: tuple[tuple[Assignment, Assignment], ...]
    unknown: tuple[str, ...]
    unfilled: tuple[str, ...]


def match_names(
    model: torch.nn.Module,
    files: Sequence[SafetensorsFile],
    targets: Mapping[str, torch.Tensor],
    rename: Renamer,
    *,
    verified: bool,
) -> Match:
    """Sort the stored tensors. `targets` are the model's parameters and saved buffers by every name they have.

    `verified`: the bytes of each copy and part will be compared with the right ones, so a tensor that is perhaps
    more than renamed may be tried. Otherwise such a tensor is unknown.
    """
    copies: list[Assignment] = []
    casts: list[Assignment] = []
    parts: list[Assignment] = []
    repeats: list[tuple[Assignment, Assignment]] = []
    unknown: list[str] = []
    filled: dict[int, Assignment] = {}
    for file in files:
        for stored in file.tensors:
            target, only_renamed = rename(stored.name)
            tensor = targets.get(target)
            if tensor is None:
                if not (only_renamed and _is_ignored(model, stored.name)):
                    unknown.append(stored.name)
                continue
            assignment = Assignment(file=file, stored=stored, target=target)
            same_type, same_shape = DTYPES.get(stored.dtype) == tensor.dtype, stored.shape == tuple(tensor.shape)
            if verified and same_type and not same_shape:
                parts.append(assignment)
            elif not same_shape or stored.dtype not in DTYPES or not (only_renamed or verified):
                unknown.append(stored.name)
            elif id(tensor) in filled:
                repeats.append((assignment, filled[id(tensor)]))
            else:
                (copies if same_type else casts).append(assignment)
                filled[id(tensor)] = assignment
    return Match(
        copies=tuple(copies),
        casts=tuple(casts),
        parts=tuple(parts),
        repeats=tuple(repeats),
        unknown=tuple(unknown),
        unfilled=tuple(sorted(name for name, tensor in targets.items() if id(tensor) not in filled)),
    )


def renamer(model: torch.nn.Module, targets: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Renamer:
    """How Transformers names this model's stored tensors.

    When its internals are not what this file knows (those of 5.1 and later), no name is said to be only renamed.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        steps = get_model_conversion_mapping(model)
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        whole = len(renamings) + len(converters) == len(steps) and not model._get_dtype_plan(dtype)
        prefix, by_name = model.base_model_prefix, dict(targets)
    except (ImportError, AttributeError, TypeError):
        return lambda name: (name, False)

    def rename(name: str) -> tuple[str, bool]:
        target, converter = rename_source_key(name, renamings, converters, prefix, by_name)
        return str(target), whole and converter is None

    return rename


def _is_ignored(model: torch.nn.Module, name: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return _STALE_BUFFERS.search(name) is not None or any(re.search(pattern, name) for pattern in patterns)
