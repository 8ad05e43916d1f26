"""Every text of the report that is not about a cause, in English and Chinese."""

from __future__ import annotations

import re

from kvdepot.audit.causes import CAUSES
from kvdepot.audit.result import Finding

__all__ = [
    "EDITS",
    "LANGUAGES",
    "edit_text",
    "finding_advice",
    "finding_title",
    "in_language",
    "say",
]

LANGUAGES = ("en", "zh")

EDITS: dict[str, tuple[str, str]] = {
    "move": (
        "move the value to the end of the last user message",
        "把该值移到最后一条用户消息末尾",
    ),
    "align": ("one version for all requests", "所有请求使用同一版本"),
    "sort_tools": ("sort the tools by name", "按名称排序工具"),
    "canonical_tools": ("sort the tools and their keys", "排序工具及其键"),
    "every_tool": (
        "always the whole set of tools, in one form",
        "始终发送完整且形式固定的工具集合",
    ),
    "one_extra": ("one value for all", "统一为一个值"),
    "one_template": ("pin the template's date and arguments", "固定模板的日期和参数"),
    "normal_text": ("normalise line ends, blanks and Unicode", "规范换行、空白和 Unicode"),
    "canonical_json": ("write JSON in one way", "统一 JSON 写法"),
    "sorted_json": ("sort the keys of JSON", "对 JSON 的键排序"),
    "sort_pieces": ("one fixed order of the pieces", "固定片段顺序"),
    "popular_first": ("the most frequent pieces first", "最常用的片段在前"),
    "no_reasoning": ("leave reasoning out of every answer", "所有回答都去掉推理内容"),
    "final_form": (
        "send each message from the start as it is sent at the end",
        "从一开始就以最终形式发送消息",
    ),
    "first_image": ("send the picture as it was encoded first", "发送首次编码的图片"),
    "wide_window": ("cut the history in big steps", "大步裁剪历史"),
    "behind": ("move the changing piece behind the passages", "把变化的片段移到段落之后"),
    "by_id": ("passages in the order of their ids", "按编号排列段落"),
}

_TEXTS: dict[str, tuple[str, str]] = {
    "title": ("Prefix audit", "提示前缀审计"),
    "lead": (
        (
            "{share:.1%} of {tokens} input tokens can be reused as the prompts are; edits of the prompts"
            " prove {points:.1f} points more."
        ),
        (
            "按现状，{tokens} 个输入 token 中有 {share:.1%} 可以复用；经重放证明，"
            "修改提示可再增加 {points:.1f} 个百分点。"
        ),
    ),
    "clean": ("No prompt breaks that are worth an edit.", "没有值得修改的前缀断点。"),
    "unknown": (
        "Breaks and causes cannot be told from this input.",
        "此输入无法判断断点和原因。",
    ),
    "after_edits": ("LRU, after the edits", "修改后的 LRU"),
    "verdict": ("Verdict", "结论"),
    "reorder": ("Reorder the prompt", "调整提示顺序"),
    "route": ("Route sticky", "粘性路由"),
    "cache": ("Bigger or shared cache", "更大的或共享的缓存"),
    "more_gpus": ("More GPUs", "增加 GPU"),
    "waterfall": ("What the edits bring, one after the other", "逐项修改的收益"),
    "now": ("now", "现状"),
    "reused": ("reused", "复用"),
    "computed": ("computed", "计算"),
    "findings": ("Where reuse is lost, and why", "复用在哪里丢失，为什么"),
    "place": ("place", "位置"),
    "evidence": ("evidence", "证据"),
    "advice": ("what to do", "建议"),
    "edit": ("edit that was tried", "所试修改"),
    "proved": ("proved by running the traffic again", "重放流量所证明"),
    "alone": ("alone", "单独"),
    "estimate": ("estimate before the proof", "证明前的估计"),
    "requests": ("requests", "请求"),
    "decide": (
        "decide first: this changes who shares, or what is answered",
        "请先决定：这会改变共享范围或回答",
    ),
    "strip_hit": ("hit", "命中"),
    "strip_gap": ("break", "断点"),
    "strip_body": ("shared body behind it", "断点后的共享正文"),
    "strip_new": ("new", "新内容"),
    "example": ("one request, before and after", "一个请求，修改前后"),
    "capacity": ("How big a cache", "缓存需要多大"),
    "capacity_axis": ("capacity, tokens", "容量（token）"),
    "keep": ("How long to keep", "需要保留多久"),
    "keep_axis": ("kept after the last use", "最后一次使用后保留"),
    "bound": ("knowing the future", "已知未来的上界"),
    "fleet": ("Several instances", "多实例"),
    "instances": ("instances", "实例数"),
    "random": ("random", "随机"),
    "sticky": ("sticky", "粘性"),
    "shared": ("one shared cache", "共享缓存"),
    "load": ("busiest / mean", "最忙/平均"),
    "grains": ("Lost to whole blocks", "因整块对齐而丢失"),
    "block": ("block, tokens", "块（token）"),
    "lost": ("lost", "丢失"),
    "apps": ("Applications", "应用"),
    "app": ("application", "应用"),
    "input": ("The input", "输入"),
    "kind": ("kind", "类型"),
    "lines": ("lines", "行"),
    "order": ("order", "顺序"),
    "tokenizer": ("tokenizer", "分词器"),
    "template": ("chat template", "聊天模板"),
    "broken": ("lines that cannot be read", "无法读取的行"),
    "doubles": ("rows logged twice", "重复记录"),
    "cut": ("prompts cut by the logger", "被日志截断的提示"),
    "usage": ("token counts that differ from the server's", "与服务器计数不同"),
    "cannot": ("cannot be told from this input", "此输入无法回答"),
    "rate": ("prefill tokens per second, for seconds", "预填充速度（用于换算秒）"),
    "distrust": ("This result cannot be trusted", "结果不可信"),
    "follow_ups": ("follow-ups", "追问"),
    "first_asks": ("first asks", "首问"),
    "revisit": ("used again after", "再次使用间隔"),
    "tokens": ("tokens", "token"),
    "lru": ("LRU", "LRU"),
    "share": ("share of input tokens", "占输入 token 比例"),
    "problems": ("What could not be used", "无法使用的内容"),
    "total": ("all", "全部"),
}


def say(key: str, language: str = "en") -> str:
    """A text by its key."""
    return _TEXTS[key][LANGUAGES.index(language)]


def edit_text(what: str, language: str = "en") -> str:
    """What an edit does."""
    return EDITS[what][LANGUAGES.index(language)] if what in EDITS else what


def finding_title(finding: Finding, language: str = "en") -> str:
    """The name of a finding's cause."""
    return CAUSES[finding.cause].title_zh if language == "zh" else finding.title


def finding_advice(finding: Finding, language: str = "en") -> str:
    """What to do about a finding."""
    return CAUSES[finding.cause].advice_zh if language == "zh" else finding.advice


#: sentences that are put together from numbers, as patterns, and their Chinese form
_SENTENCES: list[tuple[str, str]] = [
    (
        r"edits of the prompts prove (\S+) points; they cost nothing to run",
        r"修改提示经证明可提升 \1 个百分点，运行零成本",
    ),
    (r"no edit of the prompts is worth it", "没有值得做的提示修改"),
    (r"the order of prompts cannot be told from this input", "此输入无法判断提示顺序"),
    (
        r"sticky routing against random routing, with (\d+) instances of (\d+) tokens each",
        r"粘性路由相对随机路由，\1 个实例，每个 \2 token",
    ),
    (r"one cache of (.+?) for all, over sticky routing", r"一个容量 \1 的共享缓存，相对粘性路由"),
    (r": not worth it", "：不值得"),
    (r"; to have 95 % of all reuse, keep blocks (.+?)(?=;|$)", r"；要得到 95 % 的复用，需保留 \1"),
    (r"; a cache that keeps everything would reuse (\S+) %", r"；保留一切的缓存可复用 \1 %"),
    (
        r"(\S+) % of the input tokens are new and have to be computed, whatever is kept",
        r"\1 % 的输入 token 是新的，无论保留什么都必须计算",
    ),
    (r"a (time|date) that goes with the request's time", "随请求时间变化的时间值"),
    (r"a time that changes with the request's", "随请求时间变化的时间值"),
    (r"another one in each request", "每个请求都不同"),
    (r"one for each session", "每个会话一个值"),
    (r"one for each user", "每个用户一个值"),
    (r"a place or a setting", "路径、主机或设置"),
    (r"rolled out once at ([^:]\S*(?: s)?)(?=: )", r"于 \1 更新一次"),
    (r"versions at the same time", "多个版本同时存在"),
    (r"free text ahead of the body", "正文之前的自由文本"),
    (r"few values, interleaved", "少数几个值交替出现"),
    (r"(\d+) values in (\d+) requests", r"\2 个请求中有 \1 个值"),
    (r", (\d+) users", r"，\1 个用户"),
    (r", (\d+) runs", r"，\1 段"),
    (r"(\d+) messages dropped in (\d+) requests", r"\2 个请求丢弃了 \1 条消息"),
    (r"(\d+) requests; in most at message (-?\d+)", r"\1 个请求；多数在第 \2 条消息"),
    (r"(\d+) of (\d+) tools stand at another place", r"\2 个工具中有 \1 个位置不同"),
    (r"(\d+) values of (\S+) keep equal tokens apart", r"\2 的 \1 个值隔开了相同的 token"),
    (r"(\d+) requests are written in another way", r"\1 个请求的写法不同"),
    (r"^(\d+) requests", r"\1 个请求"),
    (
        r"(\d+) tokens are reused from requests still in prefill at (\d+) tokens/s",
        r"\1 个 token 复用自仍在预填充的请求（\2 token/s）",
    ),
    (
        r"the server logs (\d+) cached tokens in (\d+) requests; a cache that keeps everything has (\d+)",
        r"服务器在 \2 个请求中记录了 \1 个缓存 token；保留一切的缓存应有 \3 个",
    ),
    (
        r"(\d+) tokens are equal to an earlier request's, but fill no block of (\d+)",
        r"\1 个 token 与之前的请求相同，但不满 \2 的整块",
    ),
]


def in_language(sentence: str, language: str) -> str:
    """A sentence of a result, which is kept in English, in another language as far as it is known."""
    if language == "zh":
        for english, chinese in _SENTENCES:
            sentence = re.sub(english, chinese, sentence)
    return sentence
