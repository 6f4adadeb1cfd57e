"""Texts that end a completion, found in token ids."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Which completions contain a stop string in the last of their tokens.

    Args:
        tokenizer: Decodes the tokens.
        stop: The texts that end a completion, at least one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # A token is at least one byte of text, so this many tokens hold every stop string that just ended.
        self.tail = max(len(text.encode()) for text in stop) + 1

    def __call__(self, ends: Sequence[Sequence[int]], news: Sequence[int]) -> list[int]:
        kept = [0] * len(ends)
        # All new tokens of a completion together first, and one by one only where a stop string is among them.
        for row, has_stop in enumerate(self._have(ends)):
            if has_stop:
                end, new = ends[row], news[row]
                places = range(len(end) - new + 1, len(end) + 1)
                each = self._have([end[max(0, place - self.tail) : place] for place in places])
                kept[row] = next((number for number, found in enumerate(each, 1) if found), 0)
        return kept

    def _have(self, tokens: Sequence[Sequence[int]]) -> list[bool]:
        texts = self._tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False)
        return [any(text in decoded for text in self._stop) for decoded in texts]
