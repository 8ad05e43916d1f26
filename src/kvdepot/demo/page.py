"""The demo's result for people: ``demo.html``, one file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kvdepot.demo.result import ArmResult, DemoResult
from kvdepot.report.bars import Bar, bars, legend
from kvdepot.report.page import Html, definitions, join, page, paragraph, table, tag, text
from kvdepot.units import format_bytes

__all__ = ["format_ratio", "format_seconds", "result_page"]

#: tiers of the account, in the order of the stacked bars' parts behind what was computed
_MEMORY_TIERS = ("device", "host")

_HOW_MEASURED = (
    "from the question as text to the first token sampled; each arm is a process of its own that has "
    "started and run a small prompt before, and nothing runs beside it"
)


def format_seconds(seconds: float) -> str:
    """For people: three significant digits, milliseconds below one second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def format_ratio(ratio: float) -> str:
    """How many times faster."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def result_page(result: DemoResult) -> str:
    """The whole page."""
    return page(
        "kvdepot demo: the second question does not read the document again", *_parts(result)
    )


def _parts(result: DemoResult) -> Iterator[Html]:
    first, follow_up = result.arm("recompute"), result.arm("follow_up")
    yield paragraph(
        f"{result.document.name}, {first.prompt_tokens} tokens with the question, read by "
        f"{result.model.name}. Without a depot the first token takes {format_seconds(first.ttft_s)}; a "
        f"new process that finds the document in the pool needs {format_seconds(follow_up.ttft_s)}: "
        f"{format_ratio(result.speedup_follow_up_vs_recompute)} faster.",
        class_="lead",
    )
    if result.problems:
        yield tag("h2", text("What did not go as it should"))
        yield tag("ul", *(tag("li", text(each), class_="bad") for each in result.problems))
    yield tag("h2", text("Time to the first token"))
    yield bars(
        [
            Bar(arm.name, f"{format_seconds(arm.ttft_s)} ({_against(arm)})", (arm.ttft_s,))
            for arm in result.arms
        ]
    )
    yield tag("h2", text("Tokens of the prompt"))
    yield legend(("computed", "reused from memory", "reused from disk"))
    yield bars([_token_bar(arm) for arm in result.arms], kinds=("a", "b", "c"))
    yield tag("h2", text("Bytes read from the pool"))
    yield bars(
        [Bar(arm.name, format_bytes(arm.bytes_read), (arm.bytes_read,)) for arm in result.arms],
        kinds=("c",),
    )
    yield tag("h2", text("Why a changed first line reuses nothing"))
    yield paragraph(result.why_changed_first_line_reuses_nothing)
    yield tag("h2", text("The answers"))
    yield from (_answer(arm) for arm in result.arms)
    yield tag("h2", text("The numbers"))
    yield _numbers(result)
    yield tag("h2", text("How this was measured"))
    yield _circumstances(result)


def _against(arm: ArmResult) -> str:
    return "the baseline" if arm.name == "recompute" else format_ratio(arm.speedup)


def _token_bar(arm: ArmResult) -> Bar:
    from_memory = sum(arm.reused_tokens.get(tier, 0) for tier in _MEMORY_TIERS)
    from_disk = arm.reused_total - from_memory
    value = f"{arm.computed_tokens} computed, {arm.reused_total} reused"
    return Bar(arm.name, value, (arm.computed_tokens, from_memory, from_disk))


def _answer(arm: ArmResult) -> Html:
    same = {
        True: " The same answer as recompute's, to the letter.",
        False: " Another answer than recompute's.",
        None: "",
    }[arm.same_answer_as_recompute]
    return join(
        [
            tag("p", tag("b", text(arm.name)), text(f": {arm.what}{same}")),
            tag("p", text(arm.question), class_="soft"),
            tag("blockquote", text(arm.answer or "(no text)")),
        ]
    )


def _numbers(result: DemoResult) -> Html:
    tiers = sorted({tier for arm in result.arms for tier in arm.reused_tokens})
    heads = ["arm", "first token", "against recompute", "prompt", "computed"]
    heads += [*(f"from {tier}" for tier in tiers), "read", "written"]
    rows = [
        [
            arm.name,
            format_seconds(arm.ttft_s),
            format_ratio(arm.speedup),
            arm.prompt_tokens,
            arm.computed_tokens,
            *(arm.reused_tokens.get(tier, 0) for tier in tiers),
            format_bytes(arm.bytes_read),
            format_bytes(arm.bytes_written),
        ]
        for arm in result.arms
    ]
    return table(heads, rows, numbers=len(heads) - 1)


def _circumstances(result: DemoResult) -> Html:
    pool, model = result.pool, result.model
    awaited_s = result.arm("other_instance").awaited_s
    facts: list[tuple[str, object]] = [
        ("time to first token", _HOW_MEASURED),
        ("document", f"{result.document.name}: {result.document.source}"),
        ("model", f"{model.name}, {model.dtype}, attention {model.attention}, greedy"),
        ("pool", f"{pool.url} on {pool.file_system or 'an unknown file system'}"),
        ("page cache", f"{pool.page_cache} ({pool.direct_reason})"),
        ("blocks", pool.block_reason),
        (
            "other_instance",
            f"waited {format_seconds(awaited_s)} to see the other's blocks, untimed",
        ),
        *result.environment.items(),
        ("kvdepot", result.kvdepot_version),
        ("finished", f"{result.finished_at}, after {format_seconds(result.wall_s)}"),
    ]
    return definitions(facts)
