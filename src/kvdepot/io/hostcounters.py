"""Counters of this host that show what storage and network really moved, and what else was going on.

Linux only; what is not known is None or left out, never 0.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import msgspec

__all__ = [
    "HostCounters",
    "ProcessUse",
    "device_of",
    "environment",
    "host_counters",
    "link_rate",
    "own_use",
    "page_residency",
    "process_bytes",
    "process_use",
]

_SECTOR_BYTES = 512
_PAGE_BYTES = mmap.PAGESIZE
_SAMPLED_FILE_BYTES = 64 << 20
_NETWORK_LINKS = Path("/sys/class/net")
_THROTTLES = Path("/sys/devices/system/cpu")
_SENSORS = Path("/sys/class/thermal")
_MOUNT_COUNTERS = Path("/proc/self/mountstats")
#: whose versions decide what is measured, where this interpreter has them
_PACKAGES = ("kvdepot", "vllm", "torch", "transformers", "sglang", "lmcache")


class HostCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the boot, at one moment."""

    #: of the block device under the pool, or of its NFS mount; None where there is neither
    device_read_bytes: int | None = None
    device_written_bytes: int | None = None
    #: of all network interfaces but the loopback
    net_received_bytes: int | None = None
    net_sent_bytes: int | None = None
    #: RDMA ports, which network interfaces do not count
    rdma_received_bytes: int | None = None
    swapped_pages: int | None = None
    #: of processor time of all processors, in seconds
    cpu_busy_s: float | None = None
    load_average: float | None = None
    #: of processor time that other guests of the machine got instead, in seconds
    cpu_stolen_s: float | None = None
    processors: int | None = None
    #: times that processors were slowed down because they were hot
    throttles: int | None = None
    #: of the hottest sensor, and the mean clock of the processors: for the record
    temperature_c: float | None = None
    clock_mhz: float | None = None


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a process and those that it started have had so far; those that have ended count too."""

    read_bytes: int
    written_bytes: int
    cpu_s: float


def host_counters(pool: str | Path | None) -> HostCounters:
    """Read the counters; some small reads from the kernel's own file systems."""
    read = written = None
    device = device_of(pool) if pool is not None else None
    if device is not None:
        fields = _text(f"/sys/dev/block/{device}/stat").split()
        if len(fields) > 6:
            read, written = int(fields[2]) * _SECTOR_BYTES, int(fields[6]) * _SECTOR_BYTES
    elif pool is not None:
        read, written = _mount_bytes(pool)
    received, sent = _network()
    swapped = re.findall(r"^pswp(?:in|out) (\d+)$", _text("/proc/vmstat"), re.MULTILINE)
    # user, nice, system, idle, waiting for I/O, interrupts of two kinds, stolen
    ticks = re.match(r"cpu +(\d+) (\d+) (\d+)(?: \d+){4} (\d+)", _text("/proc/stat"))
    per_s = os.sysconf("SC_CLK_TCK")
    return HostCounters(
        device_read_bytes=read,
        device_written_bytes=written,
        net_received_bytes=received,
        net_sent_bytes=sent,
        rdma_received_bytes=_rdma(),
        swapped_pages=sum(map(int, swapped)) if swapped else None,
        cpu_busy_s=sum(map(int, ticks.groups()[:3])) / per_s if ticks else None,
        load_average=os.getloadavg()[0],
        cpu_stolen_s=int(ticks[4]) / per_s if ticks else None,
        processors=os.cpu_count(),
        throttles=_sum_of(_THROTTLES, "cpu[0-9]*/thermal_throttle/core_throttle_count"),
        temperature_c=_hottest_c(),
        clock_mhz=_clock_mhz(),
    )


def device_of(path: str | Path) -> str | None:
    """``major:minor`` of the block device that a path is, or would be, on; None for others."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    number = place.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    return name if Path(f"/sys/dev/block/{name}").exists() else None


def process_bytes(pid: int) -> tuple[int, int] | None:
    """Bytes that a process and its children had storage read and write; None where it is not told.

    The page cache is not storage: what is read from it does not count.
    """
    totals = [0, 0]
    found = False
    for each in _tree(pid):
        text = _text(f"/proc/{each}/io")
        read = re.search(r"^read_bytes: (\d+)$", text, re.MULTILINE)
        written = re.search(r"^write_bytes: (\d+)$", text, re.MULTILINE)
        if read and written:
            found = True
            totals[0] += int(read[1])
            totals[1] += int(written[1])
    return (totals[0], totals[1]) if found else None


def process_use(pid: int) -> ProcessUse | None:
    """What a process and its children have read, written and computed; None where it is not told.

    Of children that have ended it counts those that their parent has waited for.
    """
    moved = process_bytes(pid)
    ticks = 0
    for each in _tree(pid):
        # the name in parentheses may have spaces and parentheses in it
        fields = _text(f"/proc/{each}/stat").rpartition(")")[2].split()
        # its own time in user and kernel mode, and that of children that have ended
        ticks += sum(map(int, fields[11:15]))
    if moved is None:
        return None
    return ProcessUse(
        read_bytes=moved[0], written_bytes=moved[1], cpu_s=ticks / os.sysconf("SC_CLK_TCK")
    )


def own_use() -> ProcessUse | None:
    """`process_use` of this process."""
    return process_use(os.getpid())


def link_rate() -> float | None:
    """Bytes a second of the fastest network link that is up, the loopback aside; None where none says."""
    speeds = [
        int(text)
        for path in _NETWORK_LINKS.glob("*/speed")
        # a link that is down says -1, or nothing
        if path.parent.name != "lo" and (text := _text(path).strip()).isdigit()
    ]
    # in millions of bits
    return max(speeds) * 1e6 / 8 if any(speeds) else None


def page_residency(folder: str | Path) -> float | None:
    """Share of the pages of a folder's files that are in the page cache; None without files.

    Large files are looked at in their first 64 MiB.
    """
    resident = pages = 0
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and not path.is_symlink():
            counts = _residency_of(path)
            resident += counts[0]
            pages += counts[1]
    return resident / pages if pages else None


def environment() -> dict[str, str]:
    """What this machine is, for the record."""
    model = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    governor = _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    found = {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "processor": model[1].strip() if model else "",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_bytes": str(int(memory[1]) * 1024) if memory else "",
        "governor": governor,
        "swap_used_bytes": _swap_used(),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", ""),
    }
    found |= {name: version for name in _PACKAGES if (version := _version(name))}
    return {name: value for name, value in found.items() if value}


def _swap_used() -> str:
    kb = dict(re.findall(r"^(Swap\w+):\s*(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE))
    if "SwapTotal" not in kb or "SwapFree" not in kb:
        return ""
    return str((int(kb["SwapTotal"]) - int(kb["SwapFree"])) * 1024)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _mount_bytes(pool: str | Path) -> tuple[int | None, int | None]:
    """Bytes that an NFS mount has had from and sent to its server, whoever asked for them."""
    place = Path(pool).resolve()
    found: tuple[int | None, int | None] = None, None
    depth = -1
    for part in _text(_MOUNT_COUNTERS).split("device ")[1:]:
        point = re.match(r"\S+ mounted on (\S+) with fstype nfs", part)
        # read and written by programs, with O_DIRECT, and then with the server
        moved = re.search(r"^\s*bytes:\s+(?:\d+ ){4}(\d+) (\d+)", part, re.MULTILINE)
        if point and moved and place.is_relative_to(point[1]):
            parts = len(Path(point[1]).parts)
            found, depth = (
                ((int(moved[1]), int(moved[2])), parts) if parts > depth else (found, depth)
            )
    return found


def _sum_of(root: Path, pattern: str) -> int | None:
    texts = [text for path in root.glob(pattern) if (text := _text(path).strip()).isdigit()]
    return sum(map(int, texts)) if texts else None


def _hottest_c() -> float | None:
    texts = [_text(path).strip() for path in _SENSORS.glob("thermal_zone*/temp")]
    # in thousandths
    return max((int(text) / 1000 for text in texts if text.isdigit()), default=None)


def _clock_mhz() -> float | None:
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return sum(map(float, found)) / len(found) if found else None


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # the name in parentheses may have spaces and parentheses in it
            fields = _text(entry / "stat").rpartition(")")[2].split()
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for each in tree:
        tree.extend(children.get(each, []))
    return tree


def _residency_of(path: Path) -> tuple[int, int]:
    try:
        size = min(path.stat().st_size, _SAMPLED_FILE_BYTES)
        if size == 0:
            return 0, 0
        with (
            path.open("rb") as file,
            mmap.mmap(
                file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            ) as mapped,
        ):
            pages = -(-size // _PAGE_BYTES)
            vector = (ctypes.c_ubyte * pages)()
            anchor = ctypes.c_char.from_buffer(mapped)
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), vector)
            del anchor
            return (0, 0) if failed else (sum(each & 1 for each in vector), pages)
    except (OSError, ValueError):
        return 0, 0


def _network() -> tuple[int | None, int | None]:
    received = sent = 0
    found = False
    for line in _text("/proc/net/dev").splitlines():
        name, is_entry, rest = line.partition(":")
        if is_entry and name.strip() != "lo":
            fields = rest.split()
            received += int(fields[0])
            sent += int(fields[8])
            found = True
    return (received, sent) if found else (None, None)


def _rdma() -> int | None:
    ports = list(Path("/sys/class/infiniband").glob("*/ports/*/counters/port_rcv_data"))
    # the counter's unit is four bytes
    return 4 * sum(int(_text(port) or 0) for port in ports) if ports else None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
