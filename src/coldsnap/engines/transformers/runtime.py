"""A loaded model and everything that answers with it: the one place where requests meet the compute thread.

All computing happens on one thread, loading included. A second thread would start compute threads of its own
(OpenMP keeps a team for each), and answers would not wait for each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoTokenizer

from coldsnap.core.messages import Answer, Prompt
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.engines.transformers.completion import Completion, Piece
from coldsnap.engines.transformers.decoders import Decoder, GrowingDecoder, StaticDecoder
from coldsnap.engines.transformers.device import Accelerator
from coldsnap.engines.transformers.generation import GREEDY, Generator
from coldsnap.engines.transformers.loading import read_config
from coldsnap.engines.transformers.options import TransformersOptions
from coldsnap.errors import EngineError, UserError

__all__ = ["Metadata", "Runtime", "read_metadata", "start_runtime"]

T = TypeVar("T")


class Runtime:
    """The model, its tokenizer, and the thread that computes."""

    def __init__(
        self,
        decoder: Decoder,
        accelerator: Accelerator,
        tokenizer: Any,
        compute: ThreadPoolExecutor,
        *,
        end_ids: frozenset[int],
        max_model_len: int | None,
        vocabulary: int,
    ) -> None:
        self._decoder = decoder
        self._accelerator = accelerator
        self._generator = Generator(decoder, end_ids)
        self._compute = compute
        self._held_bytes = 0
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocabulary = vocabulary

    @property
    def held_bytes(self) -> int:
        """Device memory that the last `let_go` left behind, beside stable memory."""
        return self._held_bytes

    def answer(self, prompt: Prompt) -> Answer:
        """See `EngineWorker.answer`. Raises UserError for a prompt that does not fit the model."""
        ids = self.prompt_ids(prompt.text)
        if not ids:
            raise UserError(f"prompt {prompt.text!r} holds no token", cure="give some text")
        if self.max_model_len is not None and len(ids) + prompt.max_tokens > self.max_model_len:
            raise UserError(
                f"a prompt of {len(ids)} tokens and {prompt.max_tokens} more do not fit into the model's "
                f"{self.max_model_len}",
                cure="ask for fewer tokens, or raise max_model_len",
            )
        completion = Completion(prompt_ids=ids, max_tokens=prompt.max_tokens, sampling=GREEDY)
        pieces: list[Piece] = []
        self.on_compute_thread(lambda: self.run(completion, pieces.append, lambda: False))
        return Answer(
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            text="".join(piece.text for piece in pieces),
        )

    def run(self, completion: Completion, emit: Callable[[Piece], None], cancelled: Callable[[], bool]) -> None:
        """Generate, giving each piece to `emit` as it comes. On the compute thread only."""
        for piece in completion.run(self._generator, self.tokenizer, cancelled):
            emit(piece)

    def on_compute_thread(self, act: Callable[[], T]) -> T:
        """Run `act` after whatever the compute thread is busy with. Raises EngineError for a foreign failure."""
        try:
            return self._compute.submit(act).result()
        except RuntimeError as error:
            raise EngineError(f"the model failed to compute: {error}") from error

    def warm_up(self, *, check: bool) -> None:
        """Make ready what answers are computed with; the weights are in place. Idempotent.

        `check`: compare a fixed cache with the model's own. Raises UserError for a model that cannot have one,
        EngineError for a foreign failure, HostError without the memory.
        """
        decoder = self._decoder
        if not isinstance(decoder, StaticDecoder):
            return

        def act() -> None:
            decoder.warm_up()
            if check:
                decoder.check()

        self.on_compute_thread(act)

    def come_back(self) -> None:
        """After a wake: the cache's memory, and what a model that was built never had. Raises as `warm_up` does."""
        decoder = self._decoder
        if isinstance(decoder, StaticDecoder):
            try:
                self.on_compute_thread(decoder.come_back)
                self.warm_up(check=False)
            except BaseException:
                self.on_compute_thread(decoder.let_go)
                raise

    def let_go(self) -> None:
        """Before a sleep: no key, no value, no block that is kept for later. Waits for what is being computed."""
        self.on_compute_thread(self._let_go)

    def _let_go(self) -> None:
        self._accelerator.settle()
        if isinstance(self._decoder, StaticDecoder):
            self._decoder.let_go()
        self._held_bytes = self._accelerator.held_bytes()

    def submit(self, act: Callable[[], None]) -> Callable[[], bool]:
        """Run `act` on the compute thread some time; the returned call takes it back if it has not begun."""
        return self._compute.submit(act).cancel

    def prompt_ids(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return list(self.tokenizer(text)["input_ids"])

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a chat by the model's own template. Raises ValueError without a template, or as it does."""
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Everything of a checkpoint but its tensors' bytes, in memory."""

    folder: Path
    files: tuple[SafetensorsFile, ...]
    config: Any
    tokenizer: Any
    end_ids: frozenset[int]


def read_metadata(folder: Path, files: Sequence[SafetensorsFile]) -> Metadata:
    """Read it. Raises UserError for a configuration or a tokenizer that cannot be loaded."""
    transformers.utils.logging.disable_progress_bar()
    config = read_config(folder)
    return Metadata(
        folder=folder,
        files=tuple(files),
        config=config,
        tokenizer=_tokenizer(folder),
        end_ids=_end_ids(folder, config.get_text_config()),
    )


def start_runtime(
    metadata: Metadata,
    options: TransformersOptions,
    make_model: Callable[[], torch.nn.Module],
    make_accelerator: Callable[[], Accelerator],
) -> Runtime:
    """Make the model on the compute thread, and the runtime around it, not warmed up.

    Raises what the two functions raise, and UserError for a model that cannot have the fixed cache that was asked for.
    """
    text_config = metadata.config.get_text_config()
    longest = options.max_model_len or getattr(text_config, "max_position_embeddings", None)
    if options.static_cache:
        longest = min(longest or options.kv_cache_tokens, options.kv_cache_tokens)
    compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def make() -> tuple[Decoder, Accelerator]:
        torch.set_num_threads(options.num_threads or len(os.sched_getaffinity(0)))
        accelerator = make_accelerator()
        model = make_model()
        if not options.static_cache or longest is None:
            return GrowingDecoder(model), accelerator
        return (
            StaticDecoder(
                model, accelerator, length=longest, vocabulary=text_config.vocab_size, graph=options.cuda_graph
            ),
            accelerator,
        )

    try:
        decoder, accelerator = compute.submit(make).result()
    except BaseException:
        compute.shutdown(wait=False)
        raise
    return Runtime(
        decoder,
        accelerator,
        metadata.tokenizer,
        compute,
        end_ids=metadata.end_ids,
        max_model_len=longest,
        vocabulary=text_config.vocab_size,
    )


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"Transformers cannot load the tokenizer in {folder}: {error}",
            cure="the folder needs the tokenizer's files beside the weights",
            facts={"path": str(folder)},
        ) from error


def _end_ids(folder: Path, config: Any) -> frozenset[int]:
    """The end tokens that the generation settings name, else the model's own."""
    found: Any = None
    path = folder / "generation_config.json"
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path} cannot be read: {error}", cure="fetch the checkpoint again") from error
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
