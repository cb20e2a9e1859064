"""The model comes up in stable memory, and every byte of it is accounted for.

The short way: build the model without initialising its weights, give every parameter and buffer its place in
the arena, read each tensor from its file straight into that place. That is a copy the observer can report: the
bytes can be brought back from the pack, or from the checkpoint by the same copy.

The long way, when Transformers does more to a checkpoint than rename it: let Transformers load the model, then
move the result into the arena. Tensors, and slices of fused tensors, whose bytes turn out to be those of the
checkpoint are reported as copies, because they are; the rest was derived, cannot be replayed byte by byte, and is
residual.

A model that is to be built again from metadata (`build_model`) can only go the short way, without the reading.

Either way a stored tensor that fills nothing, or a parameter that nothing fills, is an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from coldsnap.engines.observer import Observer
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.engines.transformers.arena import Tensors, collect_tensors, place_tensors
from coldsnap.engines.transformers.filling import Filling, same_stored_bytes
from coldsnap.engines.transformers.names import DTYPES, Match, match_names, renamer
from coldsnap.engines.transformers.options import Dtype, TransformersOptions
from coldsnap.errors import InvalidDocument, Problem, UserError
from coldsnap.hydrate.memory import StableMemory

__all__ = ["build_model", "import_architecture", "load_model", "read_config"]


def import_architecture(folder: Path) -> None:
    """Import the module of the architecture in `folder`, which Transformers does when it is first asked for.

    Raises UserError as `load_model` does.
    """
    with torch.device("meta"):
        _build(read_config(folder), torch.float32, folder)


def load_model(
    folder: Path,
    config: Any,
    files: Sequence[SafetensorsFile],
    options: TransformersOptions,
    memory: StableMemory,
    observer: Observer,
    *,
    short_way_only: bool = False,
) -> torch.nn.Module:
    """The model of the checkpoint in `folder`, ready to compute, with every parameter and buffer in `memory`.

    Raises UserError for a model Transformers cannot build, or that needs the long way where only the short one will
    do, InvalidDocument naming every tensor without a source or without a use, ResourceBusy when the asked address is
    taken.
    """
    dtype = _dtype(config, files, options.dtype)
    model = _skeleton(config, dtype, folder)
    tensors, match = _matched(model, files, dtype, verified=False)
    long_way = bool(match.unknown or match.unfilled) or not _repeats_agree(match)
    if long_way:
        if short_way_only:
            raise _no_short_way(folder, match)
        model = _load_with_transformers(folder, dtype)
        tensors, match = _matched(model, files, dtype, verified=True)
    address = int(options.arena_base, 16) if options.arena_base is not None else None
    arena = place_tensors(tensors, memory, load_order=options.load_order, address=address)
    filling = Filling(tensors, arena, memory, observer)
    if long_way:
        filling.adopt(match)
    else:
        filling.read(match)
    filling.finish()
    # Parameters keep requires_grad: without it torch multiplies the last hidden state as a batch of one, for which
    # it copies the whole output matrix first (129 ms of a first token of 283 ms, 135M model, torch 2.13).
    return model.eval()


def build_model(
    folder: Path,
    config: Any,
    files: Sequence[SafetensorsFile],
    options: TransformersOptions,
    memory: StableMemory,
    observer: Observer,
) -> torch.nn.Module:
    """The same model in the same arena, anywhere, and none of its bytes. `folder` is only named, never read.

    Raises UserError for a model that Transformers cannot build, or that needs the long way.
    """
    dtype = _dtype(config, files, options.dtype)
    model = _skeleton(config, dtype, folder)
    tensors, match = _matched(model, files, dtype, verified=False)
    if match.unknown or match.unfilled:
        raise _no_short_way(folder, match)
    filling = Filling(
        tensors,
        place_tensors(tensors, memory, load_order=options.load_order, address=None),
        memory,
        observer,
    )
    filling.expect(match)
    filling.finish()
    return model.eval()


def _matched(
    model: torch.nn.Module, files: Sequence[SafetensorsFile], dtype: torch.dtype, *, verified: bool
) -> tuple[Tensors, Match]:
    tensors = collect_tensors(model)
    targets = tensors.targets()
    return tensors, match_names(model, files, targets, renamer(model, targets, dtype), verified=verified)


def _no_short_way(folder: Path, match: Match) -> UserError:
    names = sorted({*match.unknown, *match.unfilled}) or [one.stored.name for one, _ in match.repeats]
    return UserError(
        f"the model in {folder} cannot be built from its metadata: Transformers does more than copy {names[0]}"
        + (f" and {len(names) - 1} other tensors" if len(names) > 1 else ""),
        cure="capture it with a driver that keeps initialised memory (n610, or host on a CPU)",
        facts={"path": str(folder), "tensors": names[:100]},
    )


def read_config(folder: Path) -> Any:
    """The configuration in `folder`. Raises UserError for one that cannot be read, or of a quantized model."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"Transformers cannot read the configuration in {folder}: {error}",
            cure="give a checkpoint of an architecture that the installed transformers knows",
            facts={"path": str(folder)},
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"the checkpoint in {folder} is quantized, and the transformers engine serves unquantized models only",
            cure="use the unquantized checkpoint",
            facts={"path": str(folder)},
        )
    return config


def _dtype(config: Any, files: Sequence[SafetensorsFile], wanted: Dtype) -> torch.dtype:
    if wanted is not Dtype.AUTO:
        found: torch.dtype = getattr(torch, wanted.value)
        return found
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    for file in files:
        for stored in file.tensors:
            if stored.dtype in ("BF16", "F16", "F32"):
                return DTYPES[stored.dtype]
    return torch.float32


def _skeleton(config: Any, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """The model with buffers computed and parameters that nobody has written to yet."""
    model = _build(config, dtype, folder)
    model.tie_weights()
    _compute_buffers(model)
    return model


def _build(config: Any, dtype: torch.dtype, folder: Path) -> Any:
    try:
        with no_init_weights():
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"Transformers cannot build a causal language model from {folder}: {error}",
            cure="give a checkpoint of a causal language model",
            facts={"path": str(folder)},
        ) from error


def _compute_buffers(model: torch.nn.Module) -> None:
    """Compute what no checkpoint holds as Transformers does after loading one.

    A constructor may compute a table in the weights' number type where the initialiser computes it more exactly,
    so the two are not the same. Whatever a checkpoint fills is marked and left alone.
    """
    for module in model.modules():
        saved = [buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set]
        for tensor in (*module._parameters.values(), *saved):
            if tensor is not None:
                tensor._is_hf_initialized = True  # Transformers' own mark
    model.initialize_weights()


def _repeats_agree(match: Match) -> bool:
    """Whether tensors stored once more for a tied parameter hold the same bytes as the first."""
    return all(same_stored_bytes(repeat, first) for repeat, first in match.repeats)


def _load_with_transformers(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Transformers' own loader. Raises InvalidDocument naming every tensor it found no source or no use for."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below by name, with everything else
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            f"Transformers cannot load the checkpoint in {folder}: {error}",
            cure="check that the checkpoint is whole and of an architecture that the installed transformers knows",
            facts={"path": str(folder)},
        ) from error
    faults = {
        "missing_keys": "has no source in the checkpoint",
        "unexpected_keys": "is in the checkpoint and has no destination in the model",
        "mismatched_keys": "has another shape in the checkpoint than in the model",
    }
    problems = [
        Problem(field=str(key[0] if isinstance(key, tuple) else key), message=message)
        for kind, message in faults.items()
        for key in sorted(info[kind], key=str)
    ]
    if problems:
        raise InvalidDocument(
            f"checkpoint {folder}", problems, cure="give the checkpoint that belongs to this configuration"
        )
    loaded: torch.nn.Module = model
    return loaded
