"""Watches every operation of a thread on tensors, and keeps the `Provenance` of their bytes.

Needs torch. What is below autograd arrives here, one operator at a time, with its schema, so three rules are enough:

1. an operator that moves bytes unchanged (`_MOVES`) carries their provenance, when its pieces are not too small;
2. what any other operator writes, an argument that its schema calls mutable or memory of its own that it returns, is
   spoiled, with the operator's name as the reason;
3. a view is the same bytes: nothing happens. Nor does it when a tensor object is given other memory (`set_`, `.data`).

Kernels that write through raw pointers (Triton) are not seen, and other threads neither. What they change is claimed
wrongly, and export, which compares every claim with the checkpoint, takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coldsnap.engines.vllm.provenance import Provenance, Stored
from coldsnap.engines.vllm.strides import Layout, runs_between

__all__ = ["MIN_RUN_BYTES", "NOT_DENSE", "REPEATED", "TOO_SMALL", "Tracer", "layout_of"]

MIN_RUN_BYTES = 256
"""Shorter pieces are not kept: to say where each comes from would take more room than the bytes."""

TOO_SMALL = "rearranged in pieces too small to replay"
REPEATED = "written several times by one copy"
NOT_DENSE = "read from the checkpoint into a view with gaps"
_MAX_INDICES = 1 << 16

_Move: TypeAlias = tuple[torch.Tensor, Layout, Layout, torch.dtype]
"""The tensor that is written, where in it, from where, and the number type there."""


class Tracer(TorchDispatchMode):  # type: ignore[misc] # torch is not type-checked here
    """A context manager: while it is open, this thread's operations are watched. It can be opened several times."""

    def __init__(self) -> None:
        super().__init__()
        self.provenance = Provenance()
        self._host_reads: dict[str, None] = {}

    @property
    def host_reads(self) -> tuple[str, ...]:
        """Stored tensors of which a number was taken to the host, where it may have gone anywhere; in order."""
        return tuple(self._host_reads)

    def loaded(self, tensor: torch.Tensor, stored: Stored) -> None:
        """`tensor` holds exactly the bytes of `stored` now."""
        layout = layout_of(tensor)
        if layout is None or layout.size == 0:
            return
        if not tensor.is_contiguous() or layout.size != stored.size:
            self._spoil(layout, NOT_DENSE)
        else:
            self.provenance.store(layout.ptr, stored)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """torch calls this for every operator; within it nothing is watched."""
        keywords = dict(kwargs or {})
        result = func(*args, **keywords)
        name = func._schema.name
        if name in _MAKES:
            for tensor in _tensors(result):
                self._forget(tensor)
        elif name == "aten::_local_scalar_dense":
            self._read(args[0])
        elif name not in _MOVES_NOTHING:
            self._wrote(func, args, keywords, result)
        return result

    def _wrote(self, func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> None:
        name, reason = func._schema.name, f"computed by {func._schema.name.replace('::', '.')}"
        fresh = _fresh(func, args, keywords, result)
        written = [*_mutable(func, args, keywords), *fresh]
        if not written:
            return
        moves = list(_MOVES[name](args, keywords, result)) if name in _MOVES else []
        if not moves or name not in _WHOLE:
            for tensor in written:
                if (layout := layout_of(tensor)) is not None:
                    self._spoil(layout, reason)
        for tensor, dst, src, dtype in moves:
            if dtype != tensor.dtype:
                self._spoil(dst, f"cast from {_short(dtype)} to {_short(tensor.dtype)}")
            else:
                self._move(dst, src, reason)

    def _move(self, dst: Layout, src: Layout, reason: str) -> None:
        runs = runs_between(dst, src)
        if runs is None:
            self._spoil(dst, REPEATED)
        elif runs.num_runs > 1 and runs.size < MIN_RUN_BYTES:
            self._spoil(dst, TOO_SMALL)
        else:
            self.provenance.copy(list(runs.all()), reason=reason)

    def _spoil(self, layout: Layout, reason: str) -> None:
        """All that it touches; where that is many small pieces, what is between them too."""
        runs = runs_between(layout, layout)
        if runs is not None and (runs.num_runs <= 1 or runs.size >= MIN_RUN_BYTES):
            for run in runs.all():
                self.provenance.spoil(run.dst, run.size, reason)
        else:
            start, end = layout.span
            self.provenance.spoil(start, end - start, reason)

    def _forget(self, tensor: torch.Tensor) -> None:
        if (layout := layout_of(tensor)) is not None:
            start, end = layout.span
            self.provenance.forget(start, end - start)

    def _read(self, tensor: torch.Tensor) -> None:
        if (layout := layout_of(tensor)) is not None:
            for span in self.provenance.within(layout.ptr, layout.item_bytes):
                if isinstance(span.what, Stored):
                    self._host_reads[span.what.tensor] = None


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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _mutable(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that the operator's schema says it writes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else keywords.get(argument.name))


def _fresh(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> list[torch.Tensor]:
    """What it returns in memory of its own. Some operators return a view and do not say so."""
    returns = func._schema.returns
    values = result if isinstance(result, (list, tuple)) and len(returns) > 1 else [result]
    own = [value for value, one in zip(values, returns, strict=False) if one.alias_info is None]
    tensors = list(_tensors(own))
    if not tensors:
        return []
    given = {_memory(tensor) for tensor in _tensors([*args, *keywords.values()])}
    return [tensor for tensor in tensors if _memory(tensor) not in given]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else id(tensor)


def _pair(dst: torch.Tensor, src: torch.Tensor) -> Iterator[_Move]:
    """All of `src`, broadcast, to all of `dst`."""
    there, here = layout_of(dst), layout_of(src)
    if there is not None and here is not None and not (src.is_conj() or src.is_neg()):
        yield dst, there, here.expanded(there.shape), src.dtype


def _copy(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
    yield from _pair(args[0], args[1])


def _copies(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
    for dst, src in zip(args[0], args[1], strict=True):
        yield from _pair(dst, src)


def _clone(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
    yield from _pair(result, args[0])


def _cat(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
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


def _stack(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
    there = layout_of(result)
    dim = _argument(args, keywords, 1, "dim", 0) % result.dim()
    for index, part in enumerate(args[0]):
        here = layout_of(part)
        if there is not None and here is not None:
            yield result, there.select(dim, index), here, part.dtype


def _index_select(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
    there, here = layout_of(result), layout_of(args[0])
    index = args[2]
    if there is None or here is None or args[0].dim() == 0 or index.numel() > _MAX_INDICES:
        return
    dim = args[1] % args[0].dim()
    for place, wanted in enumerate(index.reshape(-1).tolist()):
        yield result, there.narrow(dim, place, 1), here.narrow(dim, wanted, 1), args[0].dtype


def _split(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
    here = layout_of(args[0])
    dim = _argument(args, keywords, 2, "dim", 0) % args[0].dim()
    at = 0
    for part, length in zip(result, args[1], strict=True):
        there = layout_of(part)
        if there is not None and here is not None:
            yield part, there, here.narrow(dim, at, length), args[0].dtype
        at += length


def _pad(args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Iterator[_Move]:
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


_MOVES: Mapping[str, Callable[[tuple[Any, ...], Mapping[str, Any], Any], Iterator[_Move]]] = {
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
_WHOLE = frozenset({"aten::copy_", "aten::clone", "aten::_to_copy", "aten::_pin_memory", "aten::lift_fresh_copy"})
"""One move, of everything: nothing else is written beside it, and the source may be the destination."""
_MAKES = frozenset(
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
_MOVES_NOTHING = frozenset(
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
