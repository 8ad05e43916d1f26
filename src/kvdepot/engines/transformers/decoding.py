"""From logits to tokens, and from tokens to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvdepot.errors import ConfigError

__all__ = ["Sampler", "TextStream"]

#: what a tokenizer writes for the bytes of a character that is not complete yet
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Sampler:
    """Picks the next token.

    Args:
        temperature: 0 is greedy; otherwise the logits are divided by it.
        top_p: keep the most likely tokens up to this probability, in (0, 1].
        seed: makes sampling repeatable; None draws one.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self, *, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None
    ) -> None:
        if not temperature >= 0:
            raise ConfigError(f"temperature must be 0 or more, not {temperature}")
        if not 0 < top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {top_p}")
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def pick(self, logits: torch.Tensor) -> int:
        """The next token, from the logits ``[vocabulary]`` of the last position."""
        if self._temperature == 0:
            return int(logits.argmax())
        probabilities, order = torch.softmax(logits.float() / self._temperature, -1).sort(
            descending=True
        )
        # the token that crosses top_p still belongs to the set, so that it is never empty
        probabilities[probabilities.cumsum(-1) - probabilities >= self._top_p] = 0
        return int(order[torch.multinomial(probabilities, 1, generator=self._generator)])


class TextStream:
    """Turns tokens into text as they come.

    Text is held back while a character is incomplete, and while its end may be the beginning of a
    stop text. The stop text itself is not part of the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._ids: list[int] = []
        #: tokens before this are only decoded again as context; before the second, they are text
        self._context_start = 0
        self._text_end = 0
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Take a token; return the text that may be shown now, often empty."""
        self._ids.append(token)
        context = self._decode(self._ids[self._context_start : self._text_end])
        whole = self._decode(self._ids[self._context_start :])
        if len(whole) <= len(context) or whole.endswith(_INCOMPLETE):
            return ""
        self._context_start, self._text_end = self._text_end, len(self._ids)
        return self._give(whole[len(context) :])

    def finish(self) -> str:
        """The end of the tokens; return what was held back."""
        if self.is_stopped:
            return ""
        context = self._decode(self._ids[self._context_start : self._text_end])
        whole = self._decode(self._ids[self._context_start :])
        self._text_end = len(self._ids)
        piece = self._give(whole[len(context) :]) + self._held
        self.text += self._held
        self._held = ""
        return piece

    def _give(self, text: str) -> str:
        self._held += text
        ends = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            shown, self._held = self._held[: min(ends)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
            cut = len(self._held) - keep
            shown, self._held = self._held[:cut], self._held[cut:]
        self.text += shown
        return shown

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
