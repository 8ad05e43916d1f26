"""A job and a result of the demo, to test with."""

from __future__ import annotations

from kvdepot.demo.messages import Answered, Job, PoolFacts, Ready
from kvdepot.demo.result import ArmResult, DemoResult, DocumentFacts, ModelFacts, PoolResult

JOB = Job(
    arm="first_ask",
    model_folder="/models/small",
    model_name="small",
    dtype="float32",
    block_tokens=None,
    pool_url="/srv/pool",
    is_own_pool=True,
    run_id="abc",
    host_tokens=100,
    instruction="Answer.",
    document="A text.",
    question="What?",
    max_new_tokens=4,
    stop=("\n\n",),
)
FACTS = PoolFacts(
    block_tokens=8,
    block_reason="8 tokens: because",
    groups=3,
    block_bytes=(1, 2, 3),
    token_bytes=6,
    is_direct=True,
    direct_reason="an aligned write and read worked",
)
READY = Ready(
    prompt_tokens=100,
    context_tokens=8192,
    attention="sdpa",
    environment={"torch": "2.13"},
    pool=FACTS,
)


def answered(**changes):
    fields = {
        "ttft_s": 8.0,
        "total_s": 9.0,
        "prompt_tokens": 4250,
        "computed_tokens": 4250,
        "reused_tokens": {"device": 0, "host": 0, "disk": 0},
        "bytes_read": 0,
        "bytes_written": 0,
        "answer": "In /var/lock.",
        "answer_tokens": 5,
        "awaited_s": 0.0,
        "settled_files": 0,
        "dropped_blocks": {},
    }
    return Answered(**{**fields, **changes})


def arm(name, **changes):
    fields = {
        "name": name,
        "what": f"what {name} shows",
        "question": "Where?",
        "ttft_s": 8.0,
        "prompt_tokens": 4250,
        "computed_tokens": 4250,
        "reused_tokens": {"device": 0, "host": 0, "disk": 0},
        "bytes_read": 0,
        "bytes_written": 0,
        "answer": "In /var/lock.",
        "answer_tokens": 5,
        "total_s": 9.0,
        "start_s": 3.0,
        "awaited_s": 0.0,
        "speedup": 1.0,
        "same_answer_as_recompute": None,
        "dropped_blocks": {},
    }
    return ArmResult(**{**fields, **changes})


def reusing(name, **changes):
    fields = {
        "ttft_s": 0.15,
        "computed_tokens": 18,
        "reused_tokens": {"device": 0, "host": 0, "disk": 4232},
        "bytes_read": 195_010_560,
        "speedup": 53.3,
    }
    return arm(name, **{**fields, **changes})


def result(**changes):
    fields = {
        "kvdepot_version": "0.1.0",
        "finished_at": "2026-11-30T08:00:00+00:00",
        "wall_s": 60.0,
        "environment": {"cpu": "a CPU", "cores": "2"},
        "model": ModelFacts(name="small", dtype="float32", attention="sdpa", context_tokens=8192),
        "document": DocumentFacts(name="A standard", source="somewhere", sha256="00"),
        "pool": PoolResult(
            url="file:///srv/pool",
            file_system="ext4",
            is_direct=True,
            direct_reason="it worked",
            page_cache="O_DIRECT",
            block_tokens=8,
            block_reason="8 tokens: because",
            groups=3,
            block_bytes=(1, 2, 3),
            token_bytes=46_080,
        ),
        "arms": (
            arm("recompute"),
            arm("first_ask", bytes_written=195_010_560),
            reusing("follow_up", same_answer_as_recompute=True),
            reusing("other_instance", awaited_s=0.4),
            arm("changed_first_line"),
        ),
        "speedup_follow_up_vs_recompute": 53.3,
        "why_changed_first_line_reuses_nothing": "Because keys are chained.",
        "problems": (),
    }
    return DemoResult(**{**fields, **changes})
