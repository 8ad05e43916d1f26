"""The process of one arm: open the engine, say so, answer once when asked, end when told.

    python -m kvdepot.demo.arm

Reads its job from standard input; see `kvdepot.demo.messages`. Whatever libraries print goes to
standard error, so that the messages stay whole.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from typing import BinaryIO

import jinja2
import torch
import transformers

from kvdepot.clock import Clock, SystemClock
from kvdepot.config import PoolConfig
from kvdepot.demo.messages import (
    ASK,
    Answered,
    Failed,
    Job,
    Message,
    PoolFacts,
    Ready,
    Step,
    decode_job,
    encode,
)
from kvdepot.depot import Depot
from kvdepot.engines.transformers import EmbeddedEngine, FirstToken, Result, TextPiece
from kvdepot.errors import KvdepotError
from kvdepot.identity import Identity
from kvdepot.io.filesystem import drop_cached_pages
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import BlockKey, RequestExtras
from kvdepot.pool.tier import PoolTier
from kvdepot.units import GIB, ceil_div
from kvdepot.urls import PoolUrl

__all__ = ["Arm", "environment", "main", "prompt_text"]

log = logging.getLogger(__name__)

#: the demo's own pool is small and short-lived; it may use a nearly full disk as long as this is left
_OWN_POOL_BYTES = 8 * GIB
_OWN_FREE_BYTES_MIN = GIB // 2
#: On slow storage the engine's own limit would have the document read again, and there would be nothing
#: to see; the demo waits as long as reuse is still faster.
_LOAD_SHARE = 0.5
#: other writers' segments are looked for twice a second, so this is never reached in good order
_AWAIT_S = 30.0
_LOOK_INTERVAL_S = 0.02
_DRAIN_S = 60.0
#: A person does not see more steps than this. Nothing is said either for as long after the question: what
#: takes less needs no progress, and showing it would run beside the timing.
_STEP_INTERVAL_S = 0.5


class Arm:
    """One arm, from its job to its answer."""

    def __init__(self, job: Job, output: BinaryIO, clock: Clock) -> None:
        self._job = job
        self._output = output
        self._clock = clock
        self._told_s = 0.0
        self._never = threading.Event()
        self._engine = EmbeddedEngine.open(
            job.model_folder,
            dtype=job.dtype,
            model_name=job.model_name,
            block_tokens=job.block_tokens,
            depot=None if job.pool_url is None else self._open_depot,
            load_share=_LOAD_SHARE,
            on_progress=lambda done, total: self._step("reading the document", done, total),
        )
        self._pool = self._pool_facts()
        self._extras = RequestExtras(tenant_salt=job.run_id)
        self._text = prompt_text(self._engine, job)
        self._ids = self._engine.tokenize(self._text)
        self._say(
            Ready(
                prompt_tokens=len(self._ids),
                context_tokens=self._engine.context_tokens,
                attention=self._engine.attention,
                environment=environment(),
                pool=self._pool,
            )
        )

    def answer(self) -> None:
        """Answer the question, and wait until what was computed is visible to others."""
        awaited_s = self._await_blocks() if self._job.awaits_blocks else 0.0
        settled_files = self._settle_storage()
        before = self._counters()
        self._told_s = self._clock.monotonic_s()
        # the text and not the ids: tokenising is part of what a user waits for
        result = self._read_to_the_end()
        is_drained = True
        if self._engine.depot is not None:
            self._step("publishing what was computed", 0, 0)
            is_drained = self._engine.depot.drain(_DRAIN_S)
        after = self._counters()
        spent = {name: after[name] - before[name] for name in after}
        self._say(
            Answered(
                ttft_s=result.ttft_s,
                total_s=result.total_s,
                prompt_tokens=result.prompt_tokens,
                computed_tokens=result.computed_tokens,
                reused_tokens=result.reused_tokens,
                bytes_read=spent.get("load_bytes_total", 0),
                bytes_written=spent.get("store_bytes_total", 0),
                answer=result.text.strip(),
                answer_tokens=len(result.token_ids),
                awaited_s=awaited_s,
                settled_files=settled_files,
                dropped_blocks={
                    name: count
                    for name, count in {
                        **spent,
                        "dropped_not_published_in_time": int(not is_drained),
                    }.items()
                    if name.startswith("dropped_") and count
                },
            )
        )

    def close(self) -> None:
        """End the engine and its depot."""
        self._engine.close()

    def _read_to_the_end(self) -> Result:
        job = self._job
        written = 0
        for event in self._engine.generate(
            self._text,
            max_new_tokens=job.max_new_tokens,
            stop=job.stop,
            extras=self._extras,
        ):
            if isinstance(event, FirstToken | TextPiece):
                written += isinstance(event, TextPiece)
                self._step("writing the answer", written, job.max_new_tokens)
            else:
                return event
        raise AssertionError("a stream ends with its result")

    def _await_blocks(self) -> float:
        """Wait until the other process's blocks are in our index."""
        depot = self._engine.depot
        if depot is None:
            return 0.0
        started_s = self._clock.monotonic_s()
        keys = self._shared_keys()
        waited_s = 0.0
        while depot.lookup(keys).blocks < len(keys) and waited_s < _AWAIT_S:
            self._step("waiting for the other instance's blocks", 0, 0)
            self._never.wait(_LOOK_INTERVAL_S)
            waited_s = self._clock.monotonic_s() - started_s
        return waited_s

    def _shared_keys(self) -> list[BlockKey]:
        """Keys of the blocks that hold nothing but what comes before the question."""
        whole = self._engine.keys(self._ids, self._extras)
        before = self._text.rindex(self._job.question)
        tokens = len(self._engine.tokenize(self._text[:before])) - 1
        return whole[: tokens // self._engine.plan.block_tokens]

    def _settle_storage(self) -> int:
        """Have what was written before on the device, and none of it in the page cache.

        So that storage alone answers, and nothing is still being written beside the timing.
        """
        if self._job.pool_url is None or self._engine.depot is None:
            return 0
        return drop_cached_pages(PoolUrl.parse(self._job.pool_url).path, "*.kvseg")

    def _counters(self) -> dict[str, int]:
        return {} if self._engine.depot is None else self._engine.depot.counters()

    def _open_depot(self, identity: Identity) -> Depot:
        job = self._job
        blocks = ceil_div(job.host_tokens, identity.block_tokens) + 1
        config = PoolConfig(urls=(job.pool_url or "",))
        if job.is_own_pool:
            config = PoolConfig(
                urls=config.urls,
                capacity_bytes=_OWN_POOL_BYTES,
                free_bytes_min=_OWN_FREE_BYTES_MIN,
                free_inodes_min=0,
            )
        host_bytes = blocks * sum(identity.block_bytes)
        return Depot.open(identity, pool=config, host_bytes=host_bytes)

    def _pool_facts(self) -> PoolFacts | None:
        depot, plan = self._engine.depot, self._engine.plan
        if depot is None or self._job.pool_url is None:
            return None
        disk = self._disk(depot)
        return PoolFacts(
            block_tokens=plan.block_tokens,
            block_reason=plan.reason,
            groups=len(plan.groups),
            block_bytes=self._engine.identity.block_bytes,
            token_bytes=self._engine.token_bytes,
            is_direct=disk.is_direct,
            direct_reason=disk.direct_reason,
        )

    @staticmethod
    def _disk(depot: Depot) -> LocalDisk:
        """The disk that serves, and not another look at the folder: it may have given O_DIRECT up."""
        if not isinstance(depot.pool, PoolTier) or not isinstance(
            disk := depot.pool.roots[0].disk, LocalDisk
        ):
            raise TypeError("the demo's pool is a tier over a folder")
        return disk

    def _step(self, what: str, done: int, total: int) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._told_s >= _STEP_INTERVAL_S:
            self._told_s = now_s
            self._say(Step(what, done, total))

    def _say(self, message: Message) -> None:
        self._output.write(encode(message))
        self._output.flush()


def prompt_text(engine: EmbeddedEngine, job: Job) -> str:
    """The whole prompt: what stays the same comes first, the question last."""
    content = f"{job.document}\n\nQuestion: {job.question}"
    if not engine.tokenizer.chat_template:
        return f"{job.instruction}\n\n{content}\nAnswer:"
    user = {"role": "user", "content": content}
    try:
        return engine.chat_text([{"role": "system", "content": job.instruction}, user])
    except jinja2.TemplateError:
        # some templates know no system message
        user["content"] = f"{job.instruction}\n\n{content}"
        return engine.chat_text([user])


def environment() -> dict[str, str]:
    """What computes here."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "threads": str(torch.get_num_threads()),
    }


def main() -> int:
    """Run one arm; 0 when it ended in good order."""
    # what libraries print must not get between the messages
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    lines = sys.stdin.buffer
    try:
        arm = Arm(decode_job(lines.readline()), output, SystemClock())
        try:
            for line in lines:
                if line.strip().decode() != ASK:
                    break
                arm.answer()
        finally:
            arm.close()
    except KvdepotError as error:
        output.write(encode(Failed(str(error), error.hint)))
        return 1
    except Exception as error:
        # the demo shows one line; the whole story is in the log
        log.exception("the arm failed")
        output.write(encode(Failed(f"{type(error).__name__}: {error}", "")))
        return 1
    finally:
        output.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
