"""Watches every operation of a thread on tensors, and keeps the `Provenance` of their bytes.

Needs torch. What is below autograd arrives here, one operator at a time, with its schema, so three rules are enough:

1. an operator that moves bytes unchanged (`moves.MOVES`) carries their provenance, when its pieces are not too small;
2. what any other operator writes, an argument that its schema calls mutable or memory of its own that it returns, is
   spoiled, with the operator's name as the reason;
3. a view is the same bytes: nothing happens. Nor does it when a tensor object is given other memory (`set_`, `.data`).

Kernels that write through raw pointers (Triton) are not seen, and other threads neither. What they change is claimed
wrongly, and export, which compares every claim with the checkpoint, takes it back.

For a template two more things are wanted. `follow`: which memory holds anything that was made from the checkpoint,
changed or not, and which of it was read by the host, also by calls that reach no operator (`tolist`). `unread`: the
sources hold nothing, so a copy of their bytes is left out, and only its provenance is carried; the bytes come later,
from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coldsnap.engines.vllm.moves import MAKES, MOVES, MOVES_NOTHING, WHOLE, layout_of, tensors_in
from coldsnap.engines.vllm.provenance import Provenance, Stored
from coldsnap.engines.vllm.strides import Layout, runs_between

__all__ = ["MIN_RUN_BYTES", "NOT_DENSE", "REPEATED", "TOO_SMALL", "Tracer", "layout_of"]

MIN_RUN_BYTES = 256
"""Shorter pieces are not kept: to say where each comes from would take more room than the bytes."""

TOO_SMALL = "rearranged in pieces too small to replay"
REPEATED = "written several times by one copy"
NOT_DENSE = "read from the checkpoint into a view with gaps"

_READS = frozenset({"aten::_local_scalar_dense", "aten::equal"})
"""Operators whose result is a number on the host."""
_READERS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""What hands numbers to the host without an operator."""


class _ToHost(TorchFunctionMode):  # type: ignore[misc] # torch is not type-checked here
    """While it is open, tells of each tensor that one of `_READERS` is called for on this thread."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """torch calls this for every function of its own; within it nothing is watched."""
        if func in _READERS:
            self._tell(args[0])
        return func(*args, **(kwargs or {}))


class Tracer(TorchDispatchMode):  # type: ignore[misc] # torch is not type-checked here
    """A context manager: while it is open, this thread's operations are watched. It can be opened several times."""

    def __init__(self, *, follow: bool = False, unread: bool = False) -> None:
        super().__init__()
        self.provenance = Provenance()
        self._host_reads: dict[str, None] = {}
        self._made = Provenance() if follow else None  # "spoiled": by the tensor that it was made from
        self._unread = unread
        self._listening: list[_ToHost] = []

    def __enter__(self) -> Self:
        """Watch this thread."""
        if self._made is not None:
            self._listening.append(_ToHost(self._read))
            self._listening[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Watch no longer."""
        super().__exit__(*error)
        if self._listening:
            self._listening.pop().__exit__(*error)

    @property
    def host_reads(self) -> tuple[str, ...]:
        """Stored tensors of which a number was taken to the host, where it may have gone anywhere; in order."""
        return tuple(self._host_reads)

    def made_from(self, ptr: int, size: int) -> str | None:
        """The stored tensor, or one of several, that anything in these bytes was made from. Needs `follow`."""
        for span in self._made.within(ptr, size) if self._made is not None else ():
            return str(span.what)
        return None

    def loaded(self, tensor: torch.Tensor, stored: Stored) -> None:
        """`tensor` holds exactly the bytes of `stored` now."""
        layout = layout_of(tensor)
        if layout is None or layout.size == 0:
            return
        self._follow([tensor], stored.tensor)
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
        name = func._schema.name
        if self._unread and name == "aten::copy_" and self._is_stored(args[1]):
            result = args[0]
        else:
            result = func(*args, **keywords)
        if name in MAKES:
            for tensor in tensors_in(result):
                self._forget(tensor)
            self._follow(tensors_in(result), None)
        elif name in _READS:
            for tensor in tensors_in(args):
                self._read(tensor)
        elif name not in MOVES_NOTHING:
            self._wrote(func, args, keywords, result)
        return result

    def _wrote(self, func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> None:
        name, reason = func._schema.name, f"computed by {func._schema.name.replace('::', '.')}"
        fresh = _fresh(func, args, keywords, result)
        written = [*_mutable(func, args, keywords), *fresh]
        if not written:
            return
        if self._made is not None:
            self._follow(written, self._origin([*args, *keywords.values()]))
        moves = list(MOVES[name](args, keywords, result)) if name in MOVES else []
        if not moves or name not in WHOLE:
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
            start, end = layout.span
            for span in self.provenance.within(start, end - start):
                if isinstance(span.what, Stored):
                    self._host_reads[span.what.tensor] = None
            if (origin := self.made_from(start, end - start)) is not None:
                self._host_reads[origin] = None

    def _is_stored(self, value: torch.Tensor | float) -> bool:
        """Whether every byte that it touches is a stored one. A number is not in memory."""
        layout = layout_of(value) if isinstance(value, torch.Tensor) else None
        if layout is None:
            return False
        at, end = layout.span
        for span in self.provenance.within(at, end - at):
            if span.start > at or not isinstance(span.what, Stored):
                return False
            at = span.end
        return at == end

    def _origin(self, values: list[Any]) -> str | None:
        for tensor in tensors_in(values):
            if (layout := layout_of(tensor)) is not None:
                start, end = layout.span
                if (origin := self.made_from(start, end - start)) is not None:
                    return origin
        return None

    def _follow(self, tensors: Iterable[torch.Tensor], origin: str | None) -> None:
        """These were made from `origin`, or from nothing of the checkpoint."""
        for tensor in tensors if self._made is not None else ():
            layout = layout_of(tensor)
            if layout is None or self._made is None:
                continue
            start, end = layout.span
            if origin is not None:
                self._made.spoil(start, end - start, origin)
            elif layout.size == end - start:  # else what lies between was made from whatever it was
                self._made.forget(start, end - start)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mutable(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that the operator's schema says it writes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[index] if index < len(args) else keywords.get(argument.name))


def _fresh(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> list[torch.Tensor]:
    """What it returns in memory of its own. Some operators return a view and do not say so."""
    returns = func._schema.returns
    values = result if isinstance(result, (list, tuple)) and len(returns) > 1 else [result]
    own = [value for value, one in zip(values, returns, strict=False) if one.alias_info is None]
    tensors = list(tensors_in(own))
    if not tensors:
        return []
    given = {_memory(tensor) for tensor in tensors_in([*args, *keywords.values()])}
    return [tensor for tensor in tensors if _memory(tensor) not in given]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else id(tensor)
