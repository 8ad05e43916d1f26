"""The requests of a log in the order of time, as bodies, prompts and token ids.

An edit makes new bodies; the workshop turns them into token ids again. Lines that did not change are not
tokenized again, so a trial costs about as much as the passes over its token ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvdepot.audit.blocklog import BlockLog
from kvdepot.audit.prefix import blocks_of
from kvdepot.audit.records import Body, Record
from kvdepot.audit.render import Prompt, Renderer, taken_apart
from kvdepot.audit.tokenlog import Ids, TokenLog, token_log
from kvdepot.audit.tokens import PieceMemo

__all__ = ["PIN_TIME", "Measure", "Traffic", "Workshop"]

#: the key of a body whose template must see a constant time
PIN_TIME = "_pinned_time"


class Measure(NamedTuple):
    """What a cache that keeps everything does with some traffic."""

    input_tokens: int
    reused_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Tokens that have to be computed."""
        return self.input_tokens - self.reused_tokens


@dataclasses.dataclass(slots=True)
class Traffic:
    """Requests in the order of time; the lists are of equal length and are not changed."""

    records: list[Record]
    bodies: Sequence[Body]
    times_s: list[float]
    #: number of the session, -1 where it is not known
    sessions: list[int]
    #: number in `extra_names`
    extras: list[int]
    #: what separates caches: pairs of a field's name and its value
    extra_names: list[tuple[tuple[str, str], ...]]

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.records)

    def edited(self, bodies: Sequence[Body]) -> Traffic:
        """The same requests with other bodies."""
        return dataclasses.replace(self, bodies=bodies)

    def selected(self, numbers: Sequence[int]) -> Traffic:
        """Some of the requests, in order."""
        return Traffic(
            [self.records[each] for each in numbers],
            [self.bodies[each] for each in numbers],
            [self.times_s[each] for each in numbers],
            [self.sessions[each] for each in numbers],
            [self.extras[each] for each in numbers],
            self.extra_names,
        )

    @classmethod
    def of(cls, records: Sequence[Record]) -> Traffic:
        """Records with bodies or prompts, in the order of time."""
        sessions: dict[str, int] = {}
        extras: dict[tuple[tuple[str, str], ...], int] = {}
        return cls(
            list(records),
            [_body_of(record) for record in records],
            [record.time_s or 0.0 for record in records],
            [
                -1 if record.session is None else sessions.setdefault(record.session, len(sessions))
                for record in records
            ],
            [extras.setdefault(record.extra, len(extras)) for record in records],
            list(extras),
        )


def _body_of(record: Record) -> Body:
    if record.body is not None:
        return record.body
    return taken_apart(record.prompt or "")


class Workshop:
    """Turns traffic into prompts, token ids and blocks.

    Args:
        renderer: the model's template, or the built-in form.
        memo: the tokenizer.
        block_tokens: the engine's block.
    """

    def __init__(self, renderer: Renderer, memo: PieceMemo, block_tokens: int) -> None:
        self.renderer = renderer
        self.memo = memo
        self.block_tokens = block_tokens

    def prompts(self, traffic: Traffic) -> list[Prompt]:
        """Render every body.

        Raises:
            ValueError: a template refuses a request.
        """
        render = self.renderer.render
        return [
            render(body, None if PIN_TIME in body else at)
            for body, at in zip(traffic.bodies, traffic.times_s, strict=True)
        ]

    def token_log(self, traffic: Traffic, prompts: Sequence[Prompt]) -> TokenLog:
        """Tokenize prompts."""
        return self.log_of_ids(traffic, self.memo.prompts(prompt.text for prompt in prompts))

    def log_of_ids(
        self, traffic: Traffic, ids: Iterable[Ids], *, tokens: int | None = None
    ) -> TokenLog:
        """Put token ids together with what is known about their requests; see `token_log`."""
        return token_log(
            ids,
            tokens=tokens,
            extras=traffic.extras,
            times_s=np.asarray(traffic.times_s, np.float64),
            sessions=traffic.sessions,
        )

    def blocks(self, log: TokenLog) -> BlockLog:
        """Cut into the engine's blocks."""
        return blocks_of(log, self.block_tokens)

    def measure(self, traffic: Traffic) -> Measure:
        """Input and reused tokens of a cache that keeps everything."""
        log = self.token_log(traffic, self.prompts(traffic))
        return Measure(log.total, int(self.blocks(log).hit_tokens().sum()))
