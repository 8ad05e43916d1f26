"""The arms: what is asked in which process, in which order, and what each one shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "ARMS",
    "INSTRUCTION",
    "PHASES",
    "WHY_NOTHING_IS_REUSED",
    "ArmPlan",
    "changed_first_line",
    "question_of",
]

INSTRUCTION = "You answer questions about a technical standard."

WHY_NOTHING_IS_REUSED = (
    "The key of every block includes all tokens before it, so a changed first line changes every key "
    "behind it: put what changes from request to request behind the document, not in front of it."
)


class ArmPlan(NamedTuple):
    """One arm."""

    name: str
    #: one sentence for people
    what: str
    #: which of the questions it asks; the last one when there are fewer
    question_index: int
    has_pool: bool = True
    #: wait, before the clock starts, until another process's blocks are seen
    awaits_blocks: bool = False
    has_changed_first_line: bool = False


#: in the order in which they are reported
ARMS = (
    ArmPlan("recompute", "No depot: the whole document is read again.", 1, has_pool=False),
    ArmPlan(
        "first_ask", "The pool is empty: everything is computed, and stored behind the answer.", 0
    ),
    ArmPlan(
        "follow_up", "A new process asks another question: the document comes from storage.", 1
    ),
    ArmPlan(
        "other_instance",
        "A second process, alive beside the first, uses what the first computed.",
        2,
        awaits_blocks=True,
    ),
    ArmPlan(
        "changed_first_line",
        "The same document behind another request number: nothing can be reused.",
        1,
        has_changed_first_line=True,
    ),
)

#: Processes of one phase live at the same time. They start and answer one after the other: nothing may
#: run beside a timing, and two processes whose threads wait for each other take 30 s to start on two
#: cores, where one takes 2 s. A phase begins when the processes of the one before have ended.
PHASES: tuple[tuple[str, ...], ...] = (
    ("recompute",),
    ("first_ask", "other_instance"),
    ("follow_up",),
    ("changed_first_line",),
)


def question_of(plan: ArmPlan, questions: Sequence[str]) -> str:
    """The question that an arm asks."""
    return questions[min(plan.question_index, len(questions) - 1)]


def changed_first_line(request_number: str) -> str:
    """The instruction with a request number in front, as some applications write it."""
    return f"Request {request_number}. {INSTRUCTION}"
