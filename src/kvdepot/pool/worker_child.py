"""The worker: a child process that holds an engine's pool and moves bytes to and from its host buffer.

Started by `kvdepot.pool.worker` as ``python -m kvdepot.pool.worker_child N``, with N the descriptor of
the channel. It opens the pool that the first message names, serves the messages that follow, and ends
with the channel.

Threads: the main thread takes messages and only enqueues; the tier's own threads do the I/O; one
`Reporter` thread sends. A drain waits on a thread of its own.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvdepot.config import PoolConfig
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.buffers import HostBuffer
from kvdepot.io.childprocess import Channel, become_child
from kvdepot.io.disk import Disk
from kvdepot.keys import BlockKey
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.segment import Records
from kvdepot.pool.tier import PoolTier
from kvdepot.pool.worker_report import ReportedJob, Reporter
from kvdepot.pool.worker_wire import (
    KEYS_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    Added,
    BufferRef,
    Cancel,
    Close,
    Closed,
    Command,
    Drain,
    Drained,
    Forgot,
    Load,
    Open,
    Opened,
    Ping,
    Pong,
    Remember,
    Removed,
    Store,
    Touch,
    decode_command,
    refusal_of,
    split_keys,
)
from kvdepot.tiers import Read, Write

__all__ = ["ReportedIndex", "Worker", "main"]

log = logging.getLogger(__name__)

#: how long a worker whose parent has let go of the channel tries to publish what it has
_ORPHAN_CLOSE_S = 2.0


class ReportedIndex(BlockIndex):
    """The index of the worker; every change is reported in the order in which it was made."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def insert(self, segment_id: int, records: Records) -> None:
        # before the lock, which the reporter must never have to wait for
        self._reporter.wait_for_room()
        with self._changing:
            super().insert(segment_id, records)
            words = np.ascontiguousarray(records["key"])
            self._reporter.changed(
                Added(segment_id, words[start : start + KEYS_MAX].tobytes())
                for start in range(0, len(words), KEYS_MAX)
            )

    def remove_segment(self, segment_id: int) -> int:
        with self._changing:
            gone = super().remove_segment(segment_id)
            self._reporter.changed([Removed(segment_id)])
            return gone

    def forget(self, key: BlockKey, segment_id: int, offset: int) -> bool:
        with self._changing:
            is_forgotten = super().forget(key, segment_id, offset)
            if is_forgotten:
                self._reporter.changed([Forgot(segment_id, key)])
            return is_forgotten


class Worker:
    """The child's side of a worker tier.

    Args:
        channel: to the parent.
        make_disks: makes the disks of a pool, for tests that own the storage.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        make_disks: Callable[[PoolConfig], Sequence[Disk]] | None = None,
    ) -> None:
        self._channel = channel
        self._make_disks = make_disks
        self._reporter = Reporter(channel)
        self._tier: PoolTier | None = None
        self._buffers: list[HostBuffer] = []
        self._close_s = _ORPHAN_CLOSE_S

    def run(self) -> None:
        """Serve until the parent says so, or is gone."""
        self._reporter.start()
        try:
            while self._serve(self._channel.receive(None)):
                pass
        except EOFError:
            log.debug("the parent has let go")
        finally:
            if self._tier is not None:
                self._tier.close(self._close_s)
            self._reporter.say(Closed())
            self._reporter.close()

    def _serve(self, messages: Sequence[bytes]) -> bool:
        """Do what messages say; False after the last one that there will be."""
        for message in messages:
            command = decode_command(message)
            if self._tier is None:
                if not isinstance(command, Open) or not self._open(command):
                    return False
            elif isinstance(command, Close):
                self._close_s = command.timeout_s
                return False
            else:
                self._do(self._tier, command)
        return True

    def _open(self, command: Open) -> bool:
        logging.getLogger("kvdepot").setLevel(command.log_level)
        try:
            if command.protocol != PROTOCOL:
                raise ConfigError(
                    f"the worker speaks protocol {PROTOCOL}, the engine's process {command.protocol}",
                    hint="two installations of kvdepot are mixed; check PYTHONPATH",
                )
            self._buffers = [_mapped(buffer) for buffer in command.buffers]
            tier = PoolTier.open(
                command.config,
                command.identity,
                counters=self._reporter.counters,
                disks=self._make_disks(command.config) if self._make_disks else None,
                index=ReportedIndex(self._reporter),
            )
        except KvdepotError as error:
            self._reporter.say(refusal_of(error))
            return False
        except Exception as error:
            log.exception("the pool cannot be opened")
            self._reporter.say(refusal_of(error))
            return False
        self._tier = tier
        self._reporter.watch_usage(tier.usage)
        self._reporter.say(Opened(tier.limits, tier.recalled))
        return True

    def _do(self, tier: PoolTier, command: Command) -> None:
        match command:
            case Load():
                self._load(tier, command)
            case Store():
                self._store(tier, command)
            case Cancel(number=number):
                self._reporter.cancel(number)
            case Remember(text=text):
                tier.remember(text)
            case Touch(keys=keys):
                tier.touch(split_keys(keys))
            case Drain():
                threading.Thread(
                    target=self._drain, args=(tier, command), name="kvdepot-drain", daemon=True
                ).start()
            case Ping(number=number):
                self._reporter.say(Pong(number, self._reporter.stuck_s()))
            case _:
                raise ValueError(f"an unexpected message: {type(command).__name__}")

    def _load(self, tier: PoolTier, command: Load) -> None:
        reads = [
            Read(BlockKey(row.key), self._row(row.buffer, row.offset, row.length))
            for row in command.rows
        ]
        job = ReportedJob(
            command.number,
            [read.key for read in reads],
            self._reporter,
            deadline_s=command.deadline_s,
        )
        self._reporter.watch(job)
        tier.begin_load(job, reads, command.turn)

    def _store(self, tier: PoolTier, command: Store) -> None:
        writes = [
            Write(
                BlockKey(row.key),
                BlockKey(row.parent),
                self._row(row.buffer, row.offset, row.length),
                row.tokens,
            )
            for row in command.rows
        ]
        job = ReportedJob(command.number, [write.key for write in writes], self._reporter)
        self._reporter.watch(job)
        tier.begin_store(job, writes)

    def _drain(self, tier: PoolTier, command: Drain) -> None:
        is_drained = tier.drain(command.timeout_s)
        self._reporter.say(Drained(command.number, is_drained))

    def _row(self, buffer: int, offset: int, length: int) -> memoryview:
        """A place in a buffer; the parent has checked it, and a wrong one would cost memory safety."""
        memory = self._buffers[buffer].memory
        if offset + length > memory.nbytes:
            raise ValueError(f"row {offset}+{length} is outside of buffer {buffer}")
        return memory[offset : offset + length]


def _mapped(buffer: BufferRef) -> HostBuffer:
    try:
        return HostBuffer.of_fd(
            buffer.fd,
            buffer.length_bytes,
            fd_offset=buffer.fd_offset,
            is_prefaulted=buffer.is_prefaulted,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the host buffer cannot be mapped: {error}") from error


def main(*, make_disks: Callable[[PoolConfig], Sequence[Disk]] | None = None) -> None:
    """Entry point of the child; its last argument is the channel's descriptor."""
    logging.basicConfig(
        stream=sys.stderr, format="%(levelname)s kvdepot worker %(process)d %(name)s: %(message)s"
    )
    channel = become_child(int(sys.argv[-1]), MESSAGE_BYTES_MAX)
    try:
        Worker(channel, make_disks=make_disks).run()
    except (msgspec.MsgspecError, ValueError):
        log.exception("the parent says what cannot be understood")
        sys.exit(1)


if __name__ == "__main__":
    main()
