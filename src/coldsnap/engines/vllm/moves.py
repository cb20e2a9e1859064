"""Which operators of torch move bytes unchanged, and from where to where. Needs torch.

A table by an operator's name, of functions of its arguments and its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from coldsnap.engines.vllm.strides import Layout

__all__ = ["MAKES", "MOVES", "MOVES_NOTHING", "WHOLE", "Move", "layout_of", "tensors_in"]

_MAX_INDICES = 1 << 16

Move: TypeAlias = tuple[torch.Tensor, Layout, Layout, torch.dtype]
"""The tensor that is written, where in it, from where, and the number type there."""


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Where the bytes of a tensor are. None for one without memory of its own that has plain bytes."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    ptr = tensor.data_ptr()
    if ptr == 0:
        return None
    item = tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    return Layout(ptr=ptr, shape=tuple(tensor.shape), strides=strides, item_bytes=item)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def _pair(dst: torch.Tensor, src: torch.Tensor | float) -> Iterator[Move]:
    """All of `src`, broadcast, to all of `dst`. No move of a number: `copy_` takes one, as vLLM's scales need."""
    if not isinstance(src, torch.Tensor):
        return
    there, here = layout_of(dst), layout_of(src)
    if there is not None and here is not None and not (src.is_conj() or src.is_neg()):
        yield dst, there, here.expanded(there.shape), src.dtype


def _copy(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    yield from _pair(args[0], args[1])


def _copies(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    for dst, src in zip(args[0], args[1], strict=True):
        yield from _pair(dst, src)


def _clone(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    yield from _pair(result, args[0])


def _cat(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    there = layout_of(result)
    if there is None:
        return
    dim = _argument(args, keywords, 1, "dim", 0) % max(result.dim(), 1)
    at = 0
    for part in args[0]:
        if part.dim() == 1 and part.numel() == 0:  # torch takes it for nothing, whatever the others' shape is
            continue
        here, length = layout_of(part), part.shape[dim]
        if here is not None:
            yield result, there.narrow(dim, at, length), here, part.dtype
        at += length


def _stack(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    there = layout_of(result)
    dim = _argument(args, keywords, 1, "dim", 0) % result.dim()
    for index, part in enumerate(args[0]):
        here = layout_of(part)
        if there is not None and here is not None:
            yield result, there.select(dim, index), here, part.dtype


def _index_select(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    there, here = layout_of(result), layout_of(args[0])
    index = args[2]
    if there is None or here is None or args[0].dim() == 0 or index.numel() > _MAX_INDICES:
        return
    dim = args[1] % args[0].dim()
    for place, wanted in enumerate(index.reshape(-1).tolist()):
        yield result, there.narrow(dim, place, 1), here.narrow(dim, wanted, 1), args[0].dtype


def _split(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    here = layout_of(args[0])
    dim = _argument(args, keywords, 2, "dim", 0) % args[0].dim()
    at = 0
    for part, length in zip(result, args[1], strict=True):
        there = layout_of(part)
        if there is not None and here is not None:
            yield part, there, here.narrow(dim, at, length), args[0].dtype
        at += length


def _pad(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[Move]:
    there, here = layout_of(result), layout_of(args[0])
    pads = list(args[1])
    if there is None or here is None or min(pads) < 0:
        return
    for index in range(len(pads) // 2):
        dim = result.dim() - 1 - index
        there = there.narrow(dim, pads[2 * index], args[0].shape[dim])
    yield result, there, here, args[0].dtype


def _argument(args: tuple[Any, ...], keywords: Mapping[str, Any], index: int, name: str, default: int) -> int:
    return int(args[index] if index < len(args) else keywords.get(name, default))


MOVES: Mapping[str, Callable[[tuple[Any, ...], Mapping[str, Any], Any], Iterator[Move]]] = {
    "aten::copy_": _copy,
    "aten::_foreach_copy_": _copies,
    "aten::clone": _clone,
    "aten::_to_copy": _clone,
    "aten::_pin_memory": _clone,
    "aten::lift_fresh_copy": _clone,
    "aten::cat": _cat,
    "aten::stack": _stack,
    "aten::index_select": _index_select,
    "aten::split_with_sizes_copy": _split,
    "aten::constant_pad_nd": _pad,
}
WHOLE = frozenset({"aten::copy_", "aten::clone", "aten::_to_copy", "aten::_pin_memory", "aten::lift_fresh_copy"})
"""One move, of everything: nothing else is written beside it, and the source may be the destination."""
MAKES = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
# Their schemas call the tensor object mutable; not a byte of its memory is written.
MOVES_NOTHING = frozenset(
    {
        "aten::as_strided_",
        "aten::detach_",
        "aten::set_",
        "aten::squeeze_",
        "aten::swapaxes_",
        "aten::swapdims_",
        "aten::t_",
        "aten::transpose_",
        "aten::unsqueeze_",
    }
)
