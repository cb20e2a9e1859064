"""From tokens to the logits of the next one, with what the model remembers in between.

`GrowingDecoder` lets the model keep its own cache, made at the prompt and dropped at the end. `StaticDecoder` keeps
keys and values in stable memory: the prompt in one eager pass, then one fixed step again and again, which may be a
captured graph. Both begin every request from nothing, so an answer depends on the model and the request alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from coldsnap.engines.transformers.device import Accelerator
from coldsnap.engines.transformers.static_cache import UNSUITABLE_CURE, StaticCache, layer_shapes
from coldsnap.errors import EngineError, UserError

__all__ = ["Decoder", "Decoding", "GrowingDecoder", "StaticDecoder"]

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What models of different families and versions of Transformers call the cache they take and give back."""

_MASKS = {"sdpa": "which may be seen", "eager": "what is added to a score"}
"""The attention implementations whose masks this file can make."""

_TOLERANCE = 0.1
_CHECKED_TOKENS = 24


class Decoding(Protocol):
    """One request. `logits` are `[vocabulary]`, float32, in host memory: those after the last token it was given."""

    @property
    def logits(self) -> torch.Tensor: ...

    def step(self, token: int) -> None:
        """Take one more token."""
        ...


class Decoder(Protocol):
    """Makes requests, from one thread."""

    def begin(self, ids: Sequence[int]) -> Decoding:
        """A new request that has taken these tokens, at least one, and knows nothing of any other."""
        ...


class GrowingDecoder:
    """Any causal model, with the cache it makes itself, or with none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)

    def begin(self, ids: Sequence[int]) -> GrowingDecoding:
        """See `Decoder.begin`."""
        return GrowingDecoding(self, ids)

    def forward(self, ids: Sequence[int], cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits after the last of `ids`, and the cache to go on with; None: give all the tokens again next time."""
        arguments = dict(self._last_only)
        if self._cache_name is not None:
            arguments |= {"use_cache": True, self._cache_name: cache}
        device = next(self._model.parameters()).device
        with torch.inference_mode():
            out = self._model(input_ids=torch.tensor([list(ids)], device=device), **arguments)
            made = getattr(out, self._cache_name, None) if self._cache_name is not None else None
            return out.logits[0, -1].float().cpu(), made


class GrowingDecoding:
    """A request with a cache of its own."""

    def __init__(self, decoder: GrowingDecoder, ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._ids = list(ids)
        self.logits, self.cache = decoder.forward(self._ids, None)

    def step(self, token: int) -> None:
        """See `Decoding.step`."""
        self._ids.append(token)
        self.logits, self.cache = self._decoder.forward(self._ids if self.cache is None else [token], self.cache)


class StaticDecoder:
    """A causal model over a cache of `length` tokens in stable memory. `warm_up` comes first.

    Every tensor that the step reads or writes is fixed: the token, its position, the mask made from it, the logits.
    """

    def __init__(
        self, model: torch.nn.Module, accelerator: Accelerator, *, length: int, vocabulary: int, graph: bool
    ) -> None:
        """Raises UserError for a model that cannot be told its positions, its mask or its cache."""
        accepted = inspect.signature(model.forward).parameters
        cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if cache_name is None or "position_ids" not in accepted or attention not in _MASKS:
            raise UserError(
                f"a static cache needs a model that takes positions and a cache, with attention of "
                f"{' or '.join(_MASKS)}, and {type(model).__name__} has {attention}",
                cure=UNSUITABLE_CURE,
            )
        self.length = length
        self._model = model
        self._accelerator = accelerator
        self._cache_name = cache_name
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._added = attention == "eager"
        self._vocabulary = vocabulary
        self._steps = accelerator.steps(graph=graph)
        self._cache: StaticCache | None = None
        self._current: StaticDecoding | None = None

    @property
    def cache(self) -> StaticCache | None:
        """Where keys and values are, once warmed up."""
        return self._cache

    def warm_up(self) -> None:
        """Reserve the cache and make the step, unless that was done. The model's weights are in place.

        Raises UserError for a model whose layers keep something else than keys and values, or whose step cannot be
        captured; as `StableMemory.reserve` does.
        """
        if self._steps.ready:
            return
        device = self._accelerator.device
        with torch.inference_mode():
            shapes = layer_shapes(GrowingDecoder(self._model).begin([0]).cache)
            self._cache = StaticCache(
                shapes, length=self.length, memory=self._accelerator.cache_memory(), device=device
            )
            self._places = torch.arange(self.length, device=device)
            self._token = torch.zeros((1, 1), dtype=torch.int64, device=device)
            self._at = torch.zeros(1, dtype=torch.int64, device=device)
            self._logits = torch.zeros(self._vocabulary, dtype=torch.float32, device=device)
            self._steps.prepare(self._work)

    def check(self) -> None:
        """Compare a short request with the model's own cache. Raises UserError when the answers are not alike."""
        ids = [number * 7 % self._vocabulary for number in range(min(_CHECKED_TOKENS, self.length - 1))]
        growing, static = GrowingDecoder(self._model).begin(ids), self.begin(ids)
        pairs = [(growing.logits, static.logits)]
        growing.step(ids[-1])
        static.step(ids[-1])
        pairs.append((growing.logits, static.logits))
        for expected, found in pairs:
            worst, scale = float((expected - found).abs().max()), float(expected.abs().max())
            if not worst <= _TOLERANCE * scale:
                raise UserError(
                    f"{type(self._model).__name__} computes something else over a static cache: a logit differs by "
                    f"{worst:.3g}, the largest is {scale:.3g}",
                    cure=UNSUITABLE_CURE,
                    facts={"difference": worst, "largest": scale},
                )

    def begin(self, ids: Sequence[int]) -> StaticDecoding:
        """See `Decoder.begin`; the request before it is over. Raises EngineError when they do not fit."""
        cache = self._warm()
        if not 0 < len(ids) <= self.length:
            raise EngineError(f"{len(ids)} tokens do not fit into a cache of {self.length}")
        with torch.inference_mode():
            cache.clear()
            places = self._places[: len(ids)]
            tokens = torch.tensor([list(ids)], device=self._accelerator.device)
            logits = self._forward(tokens, places, self._places[None, :] <= places[:, None]).cpu()
        self._current = StaticDecoding(self, logits, position=len(ids))
        return self._current

    def step(self, decoding: StaticDecoding, token: int, position: int) -> torch.Tensor:
        """The logits after `token` at `position`. Raises EngineError for a request that is over, or a full cache."""
        if decoding is not self._current:
            raise EngineError("a request was continued after another had begun")
        if position >= self.length:
            raise EngineError(f"the cache of {self.length} tokens is full")
        with torch.inference_mode():
            self._token.fill_(token)
            self._at.fill_(position)
            self._steps.replay()
            return self._logits.cpu()

    def let_go(self) -> None:
        """Unmap the cache; the request is over."""
        self._current = None
        if self._cache is not None:
            self._cache.unmap()

    def come_back(self) -> None:
        """Remap the cache, all zero."""
        if self._cache is not None:
            self._cache.remap()

    def _work(self) -> None:
        self._logits.copy_(self._forward(self._token, self._at, self._places[None, :] <= self._at[:, None]))

    def _forward(self, tokens: torch.Tensor, places: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Logits after the last of `tokens` at `places`; `seen[i, j]`: whether token i may look at slot j."""
        cache = self._warm()
        cache.slots = places
        mask = seen[None, None]
        if self._added:
            dtype = next(self._model.parameters()).dtype
            mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
        arguments = {**self._last_only, "use_cache": True, self._cache_name: cache}
        out = self._model(input_ids=tokens, attention_mask=mask, position_ids=places[None], **arguments)
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits

    def _warm(self) -> StaticCache:
        if self._cache is None:
            raise EngineError("the decoder is not warmed up")
        return self._cache


class StaticDecoding:
    """The one request of a `StaticDecoder`."""

    def __init__(self, decoder: StaticDecoder, logits: torch.Tensor, *, position: int) -> None:
        self._decoder = decoder
        self._position = position
        self.logits = logits

    def step(self, token: int) -> None:
        """See `Decoding.step`. Raises EngineError as `StaticDecoder.step` does."""
        self.logits = self._decoder.step(self, token, self._position)
        self._position += 1
