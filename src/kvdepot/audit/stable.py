"""For tests of an application: assert that a prompt builder keeps its prefix.

    from kvdepot.audit.stable import assert_prefix_stable

    def test_prompts_share_their_head():
        assert_prefix_stable(build_messages, [("ada", "Why?"), ("bob", "How?")], at_least=0.8)

`build` is called as the application calls it and gives messages, a whole body, or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvdepot.audit.breaks import find_break, place_of
from kvdepot.audit.records import Body
from kvdepot.audit.render import ChatMl, Prompt, Renderer, taken_apart
from kvdepot.audit.texts import common_prefix

__all__ = ["Shared", "assert_prefix_stable", "prefix_shares"]

_SHOWN = 60


class Shared(NamedTuple):
    """How far one prompt goes along with the one before it."""

    #: number of the case, from 1
    case: int
    #: characters in common, and of the shorter prompt
    characters: int
    of: int
    place: str
    ours: str
    theirs: str

    @property
    def share(self) -> float:
        """Of the shorter prompt."""
        return self.characters / self.of if self.of else 1.0


def _body(made: Any) -> Body:
    if isinstance(made, str):
        return taken_apart(made)
    return made if isinstance(made, dict) else {"messages": list(made)}


def prefix_shares(
    build: Callable[..., Any], cases: Iterable[tuple[Any, ...]], *, renderer: Renderer | None = None
) -> list[Shared]:
    """Build a prompt for each case, and compare each with the one before.

    Args:
        build: called with a case's values; gives messages, a body with ``messages``, or a rendered prompt.
        cases: values; consecutive turns of one conversation, or questions that should share a document.
        renderer: the model's template; by default a form with role markers.
    """
    render = (renderer or ChatMl()).render
    bodies = [_body(build(*case)) for case in cases]
    prompts = [render(body) for body in bodies]
    return [
        _shared(
            number, (bodies[number], bodies[number - 1]), (prompts[number], prompts[number - 1])
        )
        for number in range(1, len(bodies))
    ]


def _shared(case: int, bodies: tuple[Body, Body], prompts: tuple[Prompt, Prompt]) -> Shared:
    ours, theirs = (prompt.text for prompt in prompts)
    same = common_prefix(ours, theirs)
    found = find_break(1, 0, bodies, prompts, 0)
    roles = [str(message.get("role")) for message in bodies[0]["messages"]]
    place = place_of(found.path, roles) if found is not None else "the end"
    return Shared(
        case,
        same,
        min(len(ours), len(theirs)),
        place,
        ours[same : same + _SHOWN],
        theirs[same : same + _SHOWN],
    )


def assert_prefix_stable(
    build: Callable[..., Any],
    cases: Iterable[tuple[Any, ...]],
    *,
    at_least: float = 0.5,
    renderer: Renderer | None = None,
) -> None:
    """Fail where a prompt leaves the one before it too early.

    Args:
        build: see `prefix_shares`.
        cases: see `prefix_shares`.
        at_least: share of the shorter prompt that must be in common from the first character on.
        renderer: see `prefix_shares`.

    Raises:
        AssertionError: says which case, where in the prompt, and what stands there.
    """
    for each in prefix_shares(build, cases, renderer=renderer):
        if each.share < at_least:
            raise AssertionError(
                f"case {each.case} shares {each.share:.0%} with the case before (at least {at_least:.0%}"
                f" wanted): they part in {each.place} after {each.characters} characters, at"
                f" {each.ours!r} against {each.theirs!r}"
            )
