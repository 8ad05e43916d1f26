"""How large the host tier is: vLLM's buffer in shared memory between device and pool. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvdepot.errors import ConfigError
from kvdepot.io.machine import SHARED_MEMORY, Machine
from kvdepot.units import GIB, MIB, format_bytes

__all__ = ["HostBytes", "choose_host_bytes"]

#: of the free memory; everything that passes to and from the pool passes through it
_SHARE = 10
#: where the machine is not known
_DEFAULT = 4 * GIB


class HostBytes(NamedTuple):
    """The size of the host tier, and why it is so."""

    size_bytes: int
    reason: str
    #: what a person should know; empty if nothing
    warning: str

    def describe(self) -> str:
        """One line for people."""
        return f"host tier of {format_bytes(self.size_bytes)}: {self.reason}"


def choose_host_bytes(
    *,
    explicit: int | None,
    machine: Machine | None,
    request_bytes: int,
    block_bytes: int,
    replicas: int = 1,
) -> HostBytes:
    """Choose the size of the host tier of one engine.

    Args:
        explicit: what the user wants; it wins.
        machine: where the engine will run; None where that is another one.
        request_bytes: KV of the longest request; 0 where it is not known.
        block_bytes: of one block; 0 where it is not known.
        replicas: data-parallel engines on this machine; each has a host tier of its own.

    Raises:
        ConfigError: it cannot be had, or holds not even one block.
    """
    count, reason = _chosen(explicit, machine, request_bytes, replicas)
    if count <= 0 or count < block_bytes:
        raise ConfigError(
            f"a host tier of {format_bytes(max(count, 0))} cannot hold one block"
            + (f" of {format_bytes(block_bytes)}" if block_bytes else ""),
            hint="give more: --host-bytes 4GiB, for example"
            if explicit is not None
            else f"free memory, enlarge {SHARED_MEMORY}, or say how much: --host-bytes",
        )
    if machine is not None and machine.shared_memory_free_bytes < count * replicas:
        raise ConfigError(
            f"a host tier of {format_bytes(count * replicas)} does not fit into {SHARED_MEMORY},"
            f" which has {format_bytes(machine.shared_memory_free_bytes)} free",
            hint="in a container: --shm-size or --ipc=host; otherwise remount it larger,"
            " or give less: --host-bytes",
        )
    return HostBytes(count, reason, _warning(count, request_bytes))


def _warning(count: int, request_bytes: int) -> str:
    if request_bytes <= count // 2:
        return ""
    longest = f"one request of the longest length takes {format_bytes(request_bytes)}"
    advice = f"give --host-bytes {_written(2 * request_bytes)}, or limit --max-model-len"
    if request_bytes > count:
        return (
            f"{longest} and the host tier has {format_bytes(count)}: only the beginning that fits is"
            f" reused; {advice}"
        )
    # the other half stays for loads, however slow the storage is
    return (
        f"{longest} and stores may use half of the host tier, {format_bytes(count // 2)}: where the"
        f" storage is slow, the end of such a request is not kept; {advice}"
    )


def _chosen(
    explicit: int | None, machine: Machine | None, request_bytes: int, replicas: int
) -> tuple[int, str]:
    if explicit is not None:
        return explicit, "as asked for"
    if machine is None or not machine.memory_free_bytes:
        return _DEFAULT, "the default where the machine's memory is not known"
    most = min(machine.memory_free_bytes, machine.shared_memory_free_bytes) // 2 // replicas
    share = machine.memory_free_bytes // _SHARE // replicas
    wanted = max(share, 2 * request_bytes)
    what = "two of the longest requests" if wanted > share else "a tenth of the free memory"
    if wanted > most:
        return most // MIB * MIB, f"half of what memory and {SHARED_MEMORY} have free"
    return wanted // MIB * MIB, what


def _written(count: int) -> str:
    """A size as a person would type it, not smaller than it is."""
    return f"{-(-count // GIB)}GiB" if count > GIB else f"{-(-count // MIB)}MiB"
