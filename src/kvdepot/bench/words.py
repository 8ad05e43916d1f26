"""Words of the report, in English and Chinese, and how numbers are written for people."""

from __future__ import annotations

from typing import Literal

__all__ = ["Lang", "Words", "count_text", "rate_text", "seconds_text", "share_text"]

Lang = Literal["en", "zh"]

#: key -> English, Chinese
_TEXT: dict[str, tuple[str, str]] = {
    "title": ("What the tier brings", "缓存层带来的收益"),
    "indicative": (
        "Indicative: the plan is too short to decide by.",
        "仅供参考：测试计划太短，不足以作为决策依据。",
    ),
    "VALID": ("VALID", "有效"),
    "VALID WITH NOTES": ("VALID WITH NOTES", "有效（有备注）"),
    "INVALID": ("INVALID", "无效"),
    "verdict": ("Verdict", "结论"),
    "guards": ("Guards", "有效性检查"),
    "guard": ("guard", "检查项"),
    "holds": ("holds that", "含义"),
    "result": ("result", "结果"),
    "G1": (
        "tokens by source add up to the prompt tokens, and the answers' accounts to the engine's",
        "各来源的 token 之和等于提示 token 数，应答中的账目与引擎计数一致",
    ),
    "G2": (
        "bytes from the device are the reused tokens' bytes",
        "设备读出的字节数等于复用 token 的字节数",
    ),
    "G3": (
        "the round reads from the tier that it is about, and from no other",
        "该轮只从其声明的层读取，不读其他层",
    ),
    "G4": (
        "recomputing is as fast as the same engine elsewhere",
        "重新计算的速度与同一引擎在别处一样快",
    ),
    "G5": (
        "connections = throughput x latency in a closed loop, and a TTFT is the sum of its parts",
        "闭环中连接数 = 吞吐 × 延迟，TTFT 等于各部分之和",
    ),
    "G6": (
        "all arms do the same work",
        "各对照组做同样的工作",
    ),
    "G7": (
        "all arms give the same answer",
        "各对照组给出同样的回答",
    ),
    "G8": (
        "processes were warm",
        "进程已预热",
    ),
    "G9": (
        "the machine did not change",
        "机器状态没有变化",
    ),
    "G10": (
        "nothing else used the machine",
        "没有其他程序占用机器",
    ),
    "G11": (
        "every request is accounted for",
        "每个请求都有交代",
    ),
    "G12": (
        "percentiles have the samples that they need",
        "每个百分位都有足够的样本",
    ),
    "not_asked": ("not asked: no such round was run", "未检查：未运行相关轮次"),
    "passed": ("held", "通过"),
    "note": ("note", "备注"),
    "invalid": ("INVALID", "无效"),
    "rounds": ("Rounds", "各轮测试"),
    "rounds_lead": (
        "Time to the first token (TTFT) with one request at a time; 95 % intervals are made of order "
        "statistics and assume nothing about the distribution. Where a sample is too small for a "
        "p95, its largest value is shown.",
        "每次只发一个请求时的首个 token 时间（TTFT）。95% 区间由次序统计量得出，不假设任何分布；"
        "样本不足以给出 p95 时，显示最大值。",
    ),
    "round": ("round", "轮次"),
    "arm": ("arm", "对照组"),
    "tokens": ("tokens", "token 数"),
    "runs": ("runs", "运行次数"),
    "requests": ("requests", "请求数"),
    "interval": ("95 % interval", "95% 区间"),
    "max_of": ("max of {n}: {value}", "{n} 个中的最大值：{value}"),
    "token_share": ("token share", "token 复用率"),
    "capture": ("of possible", "占理论上限"),
    "rate": ("read rate (of the least ceiling)", "读取速率（占最低上限）"),
    "R1a": ("R1a recompute, no tier", "R1a 重新计算，无缓存层"),
    "R1b": ("R1b first ask, stores", "R1b 首次提问，写入缓存"),
    "R2": ("R2 from storage alone", "R2 仅从存储读取"),
    "R2n": ("R2n never stored (control)", "R2n 从未写入（阴性对照）"),
    "R2x": ("R2x by another instance", "R2x 由另一实例读取"),
    "R1d": ("R1d first ask, kept in memory", "R1d 首次提问，保留在内存"),
    "R2d": ("R2d from memory alone", "R2d 仅从内存读取"),
    "R3": ("R3 everything on", "R3 全部开启"),
    "headlines": ("Headlines", "主要比值"),
    "headlines_lead": (
        "Ratios of medians, one for each run; intervals by bootstrap over runs; p adjusted by Holm "
        "over this table.",
        "每次运行的中位数之比；区间按运行做自助法得出；p 值在本表内按 Holm 法校正。",
    ),
    "ratio": ("ratio", "比值"),
    "speed-up": ("speed-up", "加速比"),
    "store overhead": ("store overhead", "写入开销"),
    "p": ("p (Holm)", "p（Holm）"),
    "parts": ("What the time to the first token is made of", "首个 token 时间的构成"),
    "parts_lead": (
        "Means over requests, by the engine's own counters. Loading is what computing did not hide; where "
        "the engine counts it as queueing, the queue is in it. The rest is the server's front, the network "
        "and the client.",
        "按引擎自身计数器得出的每请求均值。读取为未被计算掩盖的部分；若引擎将其计入排队，则排队包含在内。"
        "其余为服务前端、网络与客户端。",
    ),
    "mean_ttft": ("mean TTFT", "平均 TTFT"),
    "queue": ("queue", "排队"),
    "load_part": ("lookup and load", "查找与读取"),
    "compute_part": ("computing", "计算"),
    "rest": ("rest", "其余"),
    "sources": ("Where the prompt's tokens came from", "提示 token 的来源"),
    "computed": ("computed", "重新计算"),
    "device": ("device memory", "显存"),
    "host": ("host memory", "内存"),
    "disk": ("storage", "存储"),
    "external": ("host or storage", "内存或存储"),
    "cached": ("reused, source unknown", "已复用，来源未知"),
    "of_tokens": ("{share} of {count} tokens reused", "{count} 个 token 中复用 {share}"),
    "amplification": (
        "{value} times the tokens that had to be computed",
        "计算量为必需量的 {value} 倍",
    ),
    "footnote_hits": (
        "Requests with any reuse, for the record only: {hits} of {all}. Nearly every request has some; "
        "the token share is what saves time.",
        "有任何复用的请求数（仅作记录）：{hits} / {all}。几乎每个请求都有一些复用；"
        "真正节省时间的是 token 复用率。",
    ),
    "ttft_of_rounds": ("TTFT of every request of the rounds", "各轮每个请求的 TTFT"),
    "ttft_of_loads": ("TTFT of every request under load", "负载下每个请求的 TTFT"),
    "p50_interval": ("TTFT p50 (95 % interval)", "TTFT p50（95% 区间）"),
    "at_least": ("at least {rate} ({share})", "至少 {rate}（{share}）"),
    "cdf_lead": (
        "Share of requests (upwards) that had their first token by then (to the right, logarithmic).",
        "横轴为时间（对数），纵轴为在该时间内得到首个 token 的请求比例。",
    ),
    "bytes": ("Byte closure", "字节核对"),
    "bytes_lead": (
        "What the reused tokens are in bytes, what the tier loaded, and what the device gave.",
        "复用 token 对应的字节数、缓存层读取的字节数、设备实际给出的字节数。",
    ),
    "by_tokens": ("by tokens", "按 token 计"),
    "loaded": ("tier loaded", "缓存层读取"),
    "device_gave": ("device gave", "设备读出"),
    "stored": ("tier stored", "缓存层写入"),
    "loads": ("Under load", "负载测试"),
    "loads_lead": (
        "First asks (F) and follow-ups (U) apart, by what could have been reused and not by what was.",
        "首次提问（F）与后续提问（U）分开统计，按“本可复用”而非“实际复用”分类。",
    ),
    "load": ("load", "负载"),
    "class": ("class", "类别"),
    "throughput": ("requests/s", "请求/秒"),
    "goodput": ("good requests/s", "达标请求/秒"),
    "outcomes": ("Follow-ups by outcome", "后续提问的去向"),
    "miss": ("miss", "未命中"),
    "partial": ("partial", "部分命中"),
    "F": ("F first asks", "F 首次提问"),
    "U": ("U follow-ups", "U 后续提问"),
    "M": ("M the rest", "M 其余"),
    "curves": ("Rate against latency", "吞吐与延迟"),
    "curves_lead": (
        "Median TTFT (upwards, logarithmic) over requests a second (to the right).",
        "横轴为每秒请求数，纵轴为 TTFT 中位数（对数）。",
    ),
    "storm": ("Recovery storm: TTFT by rank", "恢复风暴：按到达次序的 TTFT"),
    "contention": ("Contention", "争用测试"),
    "contention_lead": (
        "The same load with foreign work on the same path. Degradation is the loss of throughput "
        "against the quiet arms before and after.",
        "相同负载，同一路径上加入外来负载。性能下降按前后两次安静对照计算。",
    ),
    "noise": ("noise", "干扰"),
    "degradation": ("degradation", "下降"),
    "breakeven": ("Break-even: promised and measured", "盈亏平衡：预测与实测"),
    "breakeven_lead": (
        "Reading wins where storage gives more than k r bytes a second: KV bytes of a token times the "
        "tokens that the engine computes in a second.",
        "当存储带宽高于 k·r（每 token 的 KV 字节数 × 每秒可计算的 token 数）时，读取优于计算。",
    ),
    "kv_bytes": ("KV bytes a token, config / written", "每 token KV 字节：配置 / 实写"),
    "compute_rate": ("computes", "计算速率"),
    "least": ("least bandwidth", "最低带宽"),
    "ceiling": ("least ceiling", "最低上限"),
    "ceiling device": ("device", "设备"),
    "ceiling network": ("network", "网络"),
    "ceiling host-to-device": ("host to device", "内存到设备"),
    "ceilings": ("Ceilings", "上限"),
    "ceilings_lead": (
        "The most that is possible on this machine, measured with no engine running: the pool's files in "
        "units of whole blocks with some reads at once, the link of a network file system, and copies of "
        "the model's rows (size x threads) from host memory into the engine's KV memory. A load can be no "
        "faster than the least of them.",
        "本机可达到的最大值，在没有引擎运行时测得：以整块为单位、若干读取并发地读取池文件；网络文件系统的链路；"
        "以及把模型的行（大小 × 线程数）从内存复制到引擎 KV 内存。读取不可能快于其中最低者。",
    ),
    "read_unit": ("one read", "单次读取"),
    "direct": ("O_DIRECT", "O_DIRECT"),
    "buffered": ("buffered", "经页缓存"),
    "reads_at_once": ("reads at once: rate", "并发读取数：速率"),
    "copies": ("host to device", "内存到设备"),
    "into": ("into {device}:", "目标 {device}："),
    "least_of_them": ("binds", "起约束作用者"),
    "predicted": ("predicted speed-up", "预测加速比"),
    "measured": ("measured speed-up", "实测加速比"),
    "curve": ("TTFT of N computed tokens", "计算 N 个 token 的 TTFT"),
    "equality": ("Claims of equality", "等价性检验"),
    "equal": ("equal within 10 %", "在 10% 以内等价"),
    "not_equal": ("not shown to be equal", "未能证明等价"),
    "record": ("Record", "记录"),
    "plan": ("plan", "测试计划"),
    "plan_hash": ("plan's hash, made before the first run", "计划哈希（首次运行前生成）"),
    "document": ("document", "文档"),
    "needle": (
        "The planted code word was answered {found} of {asked} times.",
        "预埋的暗号在 {asked} 次提问中答对 {found} 次。",
    ),
    "attribution": ("split by tier", "按层拆分依据"),
    "usage": ("exact, by the engine's answers", "精确，来自引擎应答"),
    "metrics": (
        "exact, by the engine's counters around each request",
        "精确，来自每个请求前后的计数器",
    ),
    "window": ("a sum over the window", "整个窗口之和"),
    "none": ("not known", "未知"),
    "files": ("Raw files beside this report", "本报告旁的原始文件"),
    "rows_of": ("rows", "原始行"),
    "rows_hint": (
        "Every number is made of rows of rows.jsonl; a selection for each table line is named with it.",
        "所有数字均来自 rows.jsonl；每一行都标明所选的原始行。",
    ),
    "environment": ("Environment", "环境"),
    "engine": ("engine", "引擎"),
    "tool": ("measured by", "测量工具"),
    "failed": ("failed", "失败"),
}


class Words:
    """Looks words up in one language."""

    def __init__(self, lang: Lang) -> None:
        self.lang: Lang = lang
        self._place = 1 if lang == "zh" else 0

    def __call__(self, key: str, **values: object) -> str:
        """A text; one that is not known stands for itself, as names of the user's do."""
        texts = _TEXT.get(key)
        text = key if texts is None else texts[self._place]
        return text.format(**values) if values else text

    @staticmethod
    def keys() -> list[str]:
        """All keys, for tests."""
        return list(_TEXT)


def seconds_text(seconds: float) -> str:
    """Seconds with three significant digits, in the unit that fits."""
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def share_text(share: float | None) -> str:
    """A share in per cent."""
    return "-" if share is None else f"{100 * share:.1f} %"


def count_text(count: float) -> str:
    """A number with separators between thousands."""
    return f"{count:,.0f}"


def rate_text(bytes_per_s: float | None) -> str:
    """Bytes a second, decimal, as storage is sold."""
    if bytes_per_s is None:
        return "-"
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.0f} B/s"
