"""Text in pieces is the whole text, and stop strings stop it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.engines.transformers.decoding import StopFilter, TextPieces


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


@given(prompt=st.text(max_size=12), text=st.text(max_size=30))
@settings(max_examples=100)
def test_pieces_join_to_the_text_and_never_show_half_a_character(prompt: str, text: str) -> None:
    pieces = TextPieces(Bytes(), list(prompt.encode()))
    given_out = [pieces.add(token) for token in text.encode()]
    assert "".join([*given_out, pieces.finish()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in given_out)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    pieces = TextPieces(Bytes(), [])
    assert pieces.add("é".encode()[0]) == ""
    assert pieces.finish() == "\ufffd"


def test_a_special_token_has_no_text() -> None:
    pieces = TextPieces(Bytes(), [65])
    assert (pieces.add(66), pieces.add(256), pieces.finish()) == ("B", "", "")


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=100)
def test_what_passes_is_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    # The first to be complete wins; of several complete at once, the one that begins first.
    text, expected, stopped = "", None, False
    for piece in pieces:
        text += piece
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            expected, stopped = text[: min(found)], True
            break
    filtered = StopFilter(stops)
    passed = "".join(filtered.add(piece) for piece in pieces) + filtered.finish()
    assert passed == ("".join(pieces) if expected is None else expected)
    assert filtered.stopped is stopped


def test_text_that_may_begin_a_stop_waits() -> None:
    filtered = StopFilter(["###"])
    # Two characters are always held back, for they might be the first two of the stop string.
    assert [filtered.add(piece) for piece in ("ab", "c#", "#d", "##", "#", "more")] == ["", "ab", "c#", "#d", "", ""]
    assert (filtered.stopped, filtered.finish()) == (True, "")
