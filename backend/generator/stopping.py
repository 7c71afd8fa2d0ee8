"""When a sample ends: stop tokens, and stop strings in the text decoded so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend.generator.base import Stop
from together_post_training.errors import Reason, fail

# Text of a list of tokens: special tokens included, no clean-up of spaces, U+FFFD for an unfinished character.
Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"


class StopMatcher:
    """Watches the tokens of one sample. Empty stop strings match nothing.

    A string may span tokens or end inside one: the token that completes it is the sample's last, kept whole. A
    character split over tokens counts once it is complete.

    Only the tokens since the last point where the text was whole are decoded again, so a sample of n tokens costs
    n short decodes; two such points are kept, because some decoders treat the first token of a text specially.
    """

    def __init__(self, stop: Stop, decode: Decode | None) -> None:
        """Raises INVALID_ARGUMENT for stop strings where there is no text to match."""
        self._tokens = frozenset(stop.tokens)
        self._strings = tuple(s for s in stop.strings if s)
        if self._strings and decode is None:
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"Stop strings {list(self._strings)}: this model has no tokenizer; give stop token ids.",
            )
        self._decode = decode
        self._reach = max(map(len, self._strings), default=1) - 1
        self._recent: list[int] = []
        self._num_read = 0  # of the recent tokens, those whose text is in `_tail`
        self._read = ""
        self._tail = ""

    def push(self, token: int) -> bool:
        """Takes the next token; True when it ends the sample."""
        if token in self._tokens:
            return True
        if not self._strings:
            return False
        assert self._decode is not None
        self._recent.append(token)
        text = self._decode(self._recent)
        settled = text.rstrip(_UNFINISHED)
        seen = self._tail + settled[len(self._read) :]
        if any(string in seen for string in self._strings):
            return True
        if len(settled) == len(text):
            self._settle(seen)
        return False

    def _settle(self, seen: str) -> None:
        """The text is whole here: forget what can no longer be part of a match."""
        del self._recent[: self._num_read]
        self._num_read = len(self._recent)
        assert self._decode is not None
        self._read = self._decode(self._recent)
        self._tail = seen[-self._reach :] if self._reach else ""
