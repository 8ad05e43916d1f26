"""All prompts of a log as token ids, one behind the other: 4 bytes a token, no Python lists.

Everything that follows works on these arrays; requests are in the order of their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdepot.errors import ConfigError

__all__ = ["MAX_TOKEN_ID", "Ids", "Ints", "Reals", "TokenLog", "token_log"]

Ids = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

#: 16 products of an id and a number below 2**31 must fit into 63 bits
MAX_TOKEN_ID = (1 << 27) - 1


class TokenLog(NamedTuple):
    """Prompts as token ids. Arrays are shared, and never changed."""

    #: all ids, request after request
    ids: Ids
    #: (requests + 1,): where each prompt begins in `ids`
    starts: Ints
    #: (requests,): number of the request's salt, adapter and model; equal tokens share only if equal
    extras: Ints
    times_s: Reals
    #: (requests,): number of the session, -1 where it is not known
    sessions: Ints

    @property
    def requests(self) -> int:
        """How many prompts."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        """(requests,): tokens of each prompt."""
        return np.diff(self.starts)

    @property
    def total(self) -> int:
        """Tokens of all prompts."""
        return int(self.starts[-1])

    def prompt(self, request: int) -> Ids:
        """The ids of one prompt; a view."""
        return self.ids[self.starts[request] : self.starts[request + 1]]


def token_log(
    prompts: Iterable[Ids],
    *,
    tokens: int | None = None,
    extras: Sequence[int] | Ints | None = None,
    times_s: Sequence[float] | Reals | None = None,
    sessions: Sequence[int] | Ints | None = None,
) -> TokenLog:
    """Put prompts together.

    Args:
        prompts: token ids, each array in ``[0, MAX_TOKEN_ID]``; copied one by one, so that prompts which
            are made one by one are never there twice.
        tokens: about how many there are in all; by default they are counted first.
        extras: by default all equal.
        times_s: by default the number of the request.
        sessions: by default unknown.

    Raises:
        ConfigError: an id is out of range.
    """
    if tokens is None:
        prompts = list(prompts)
        tokens = sum(map(len, prompts))
    room = np.empty(tokens, np.int32)
    ends = [0]
    for prompt in prompts:
        end = ends[-1] + len(prompt)
        if end > len(room):
            more = np.empty(max(end, len(room) * 5 // 4), np.int32)
            more[: ends[-1]] = room[: ends[-1]]
            room = more
        room[ends[-1] : end] = prompt
        ends.append(end)
    count = len(ends) - 1
    starts = np.array(ends, np.int64)
    ids = room[: ends[-1]]
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        raise ConfigError(f"token ids must be between 0 and {MAX_TOKEN_ID}")
    zeros = np.zeros(count, np.int64)
    return TokenLog(
        ids,
        starts,
        zeros if extras is None else np.asarray(extras, np.int64),
        np.arange(count, dtype=np.float64) if times_s is None else np.asarray(times_s, np.float64),
        zeros - 1 if sessions is None else np.asarray(sessions, np.int64),
    )
