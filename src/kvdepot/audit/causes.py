"""The table of causes: number, names and advice, in English and Chinese.

Keys are stable: they are what ``--fail-on`` takes and what the JSON says.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CAUSES", "Cause"]


class Cause(NamedTuple):
    """One reason why tokens are computed again."""

    number: int
    title: str
    advice: str
    title_zh: str
    advice_zh: str
    is_prompt_fault: bool = True
    needs_decision: bool = False
    #: a line of code, for people who build the prompt
    hint: str = ""


CAUSES: dict[str, Cause] = {
    "extra_key": Cause(
        1,
        "Equal prompts kept apart by salt, adapter or model",
        "Use one salt per trust domain, not per user. Whoever shares a salt can tell from the time to"
        " the first token what others have asked: decide who may.",
        "提示相同，却被盐值、适配器或模型名隔开",
        "按信任域而不是按用户设置盐值。共享盐值的人能从首词延迟推断他人问过什么，请先决定谁可以共享。",
        needs_decision=True,
        hint='cache_salt = trust_domain_of(user)  # not: f"{user}"',
    ),
    "tool_order": Cause(
        2,
        "The tools come in another order",
        "Sort the tools by name before the request is built.",
        "工具列表的顺序不固定",
        "在构造请求之前按名称排序工具。",
        hint='tools = sorted(tools, key=lambda tool: tool["function"]["name"])',
    ),
    "tool_keys": Cause(
        3,
        "The tools' JSON keys come in another order",
        "Write schemas with sorted keys, or keep the one text that was written first.",
        "工具 JSON 的键顺序不固定",
        "写出模式时对键排序，或保存第一次写出的文本。",
        hint="tools = json.loads(json.dumps(tools, sort_keys=True))",
    ),
    "tool_set": Cause(
        4,
        "The set of tools or a schema changes",
        "Send the whole set always, stable tools first; take values that change out of schemas.",
        "工具集合或工具模式在变化",
        "始终发送完整集合，稳定的工具在前；把会变化的值移出模式。",
        hint="tools = ALL_TOOLS  # and refuse calls that this user may not make",
    ),
    "time": Cause(
        5,
        "A time or date stands before the body",
        "Move it behind the body, into the last user message; or give the day only, or a tool that tells it.",
        "正文之前有时间或日期",
        "把它移到正文之后的最后一条用户消息；或只写日期；或提供查询时间的工具。",
        hint='messages[-1]["content"] += f"\\nCurrent time: {now}"',
    ),
    "request_id": Cause(
        6,
        "A request, trace or session id stands before the body",
        "Move it behind the body, or leave it out: the model does not need it.",
        "正文之前有请求号、跟踪号或会话号",
        "移到正文之后，或去掉：模型不需要它。",
        hint="log the id beside the request; do not put it into the prompt",
    ),
    "per_user": Cause(
        7,
        "Text of the user or tenant stands before the shared body",
        "Move it into the last user message, behind what all users share.",
        "共享正文之前有用户或租户的文本",
        "移到最后一条用户消息，放在所有用户共享的内容之后。",
        hint="messages = [shared_system, shared_document, {... user's text, question}]",
    ),
    "environment": Cause(
        8,
        "A path, host, locale or setting stands before the body",
        "Move it behind the body, or split the estate by it knowingly.",
        "正文之前有路径、主机、语言或设置",
        "移到正文之后，或有意按它划分部署。",
        hint='messages[-1]["content"] += f"\\nWorking directory: {folder}"',
    ),
    "rollout": Cause(
        9,
        "The prompt was changed once",
        "Nothing to do: a one-off cost. Change prompts rarely, and all at once.",
        "提示模板更新过一次",
        "无需处理：一次性成本。尽量少改，并一次改完。",
    ),
    "ab_test": Cause(
        9,
        "Several versions of the prompt at the same time",
        "Let all clients send the same version, or put the difference behind the body.",
        "同时存在多个提示版本",
        "让所有客户端发送同一版本，或把差异放到正文之后。",
        needs_decision=True,
    ),
    "template": Cause(
        10,
        "The chat template itself changes: a date, a flag, a doubled start",
        "Pin the template's date and arguments, and let one side only add the start of text.",
        "聊天模板本身在变化：日期、开关或重复的起始符",
        "固定模板的日期和参数，并只由一方添加起始符。",
        hint='chat_template_kwargs = {"date_string": "26 Jul 2024", "enable_thinking": False}',
    ),
    "white_space": Cause(
        11,
        "The same text with other line ends, blanks or Unicode forms",
        "Normalise before sending: one kind of line end, no trailing blanks, NFC.",
        "文本相同，但换行、空白或 Unicode 形式不同",
        "发送前规范化：统一换行、去除行尾空白、使用 NFC。",
        hint='text = unicodedata.normalize("NFC", text.replace("\\r\\n", "\\n"))',
    ),
    "json_form": Cause(
        12,
        "The same JSON in a message, written in another way",
        "Write JSON in one way: sorted keys, one setting for escapes and numbers.",
        "消息中的 JSON 内容相同，写法不同",
        "统一 JSON 写法：键排序，转义和数字格式固定。",
        hint="json.dumps(value, sort_keys=True, ensure_ascii=False)",
    ),
    "piece_order": Cause(
        13,
        "The same passages, examples or memories in another order",
        "Put them into one order: the most popular first, or any fixed one. Answers may change: measure.",
        "同样的片段、示例或记忆，顺序不同",
        "固定顺序：最常用的在前，或任意固定顺序。回答可能变化，请评测。",
        needs_decision=True,
        hint="passages.sort(key=lambda passage: (-popularity[passage.id], passage.id))",
    ),
    "question_first": Cause(
        14,
        "The question or other free text stands before the document",
        "Put the document first and the question last.",
        "问题或自由文本位于文档之前",
        "文档在前，问题在后。",
        hint='content = f"<document>\\n{document}\\n</document>\\n\\n{question}"',
    ),
    "window": Cause(
        15,
        "The history's window slides by a message each turn",
        "Cut in big steps (drop half when full), pin the document, or summarise once.",
        "历史窗口每轮滑动",
        "大步裁剪（满了就丢一半），固定文档，或只摘要一次。",
        needs_decision=True,
        hint="if len(history) > 2 * keep: history = history[-keep:]",
    ),
    "reasoning": Cause(
        16,
        "Reasoning is sent once and left out the next turn",
        "Keep it always or leave it out always; some templates have preserve_thinking.",
        "推理内容只发送一次，下一轮被去掉",
        "始终保留或始终去掉；有的模板提供 preserve_thinking。",
    ),
    "answer_rewritten": Cause(
        17,
        "The last answer or tool call is written anew the next turn",
        "Send back what the model wrote, token ids where possible; do not parse and dump arguments again.",
        "上一轮回答或工具调用在下一轮被重新写出",
        "原样发回模型写出的内容，尽可能用 token id；不要重新序列化参数。",
        hint='message["tool_calls"] = response.message.tool_calls  # as received',
    ),
    "compaction": Cause(
        18,
        "The history was summarised",
        "Expected. It costs this much: do it rarely, and at a turn that computes much anyway.",
        "历史被摘要压缩",
        "符合预期。代价如上：尽量少做，并在本来就要大量计算的轮次做。",
    ),
    "edited_later": Cause(
        19,
        "A message is cut or edited after it was sent",
        "Cut tool results when they are written, not later.",
        "消息在发送之后被截断或修改",
        "在写入时截断工具结果，而不是之后。",
        hint="history.append(cut(result))  # once, at the time it arrives",
    ),
    "media": Cause(
        20,
        "The same picture is encoded anew",
        "Encode it once and send the same bytes, or a stable URL.",
        "同一图片被重新编码",
        "只编码一次，发送相同字节或固定 URL。",
    ),
    "too_early": Cause(
        21,
        "The request comes while its donor is still in prefill",
        "Queue or coalesce requests that come at the same time; not a fault of the prompt.",
        "请求到来时，可复用的请求仍在预填充",
        "对同时到来的请求排队或合并；不是提示的问题。",
        is_prompt_fault=False,
    ),
    "evicted": Cause(
        22,
        "The engine computed what an earlier request had: evicted, or on another worker",
        "More capacity, a longer keep time or sticky routing; not a fault of the prompt.",
        "引擎重新计算了已有内容：被淘汰，或在其他实例上",
        "增加容量、延长保留时间或粘性路由；不是提示的问题。",
        is_prompt_fault=False,
    ),
    "granularity": Cause(
        23,
        "Equal tokens that fill no whole block",
        "Smaller blocks or chunks; pad the shared head to a block; not a fault of the prompt.",
        "相同的 token 不满一个块",
        "使用更小的块；把共享开头填充到整块；不是提示的问题。",
        is_prompt_fault=False,
    ),
}
