"""A tokenizer that needs no training data: one token a byte, then special tokens, then fillers.

Every text round-trips, and every id a model of that vocabulary can emit decodes to something. The chat
markers are ChatML's.
"""

from pathlib import Path

_TURN_START = "<|im_start|>"
_TURN_END = "<|im_end|>"
_END = "<|end|>"
_SPECIAL = (_TURN_START, _TURN_END, _END)
FIRST_FILLER_ID = 256 + len(_SPECIAL)
"""Ids below this mean something; `<|end|>`, the end of a text, is the one before it."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_byte_tokenizer(folder: Path, *, vocabulary: int) -> None:
    """Write a fast tokenizer of exactly `vocabulary` tokens, with its chat template, into `folder`.

    `vocabulary` is at least FIRST_FILLER_ID.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL]
    tokens += [f"Ġfiller{number}" for number in range(vocabulary - len(tokens))]
    bytewise = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token=_END,
        pad_token=_END,
        additional_special_tokens=[_TURN_START, _TURN_END],
        clean_up_tokenization_spaces=False,
        model_max_length=32_768,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
