"""One simulated engine: its caches, its policies, and the prompt that it computes now."""

from __future__ import annotations

from collections import deque

from kvdepot.policy.deadline import EarnedDeadline
from kvdepot.policy.decide import Run
from kvdepot.policy.host_buffer import HostAdmission
from kvdepot.policy.policies import Decision, LoadTicket, Policies
from kvdepot.sim.caches import LruBlocks
from kvdepot.sim.settings import SimSettings
from kvdepot.sim.storage import Loading
from kvdepot.sim.trace import TraceRequest

__all__ = ["Instance", "Prompt", "find_runs"]


class Prompt:
    """A request on its way through an engine."""

    __slots__ = (
        "arrived_s",
        "deadline",
        "decision",
        "found",
        "front_s",
        "has_waited",
        "have",
        "idle_s",
        "instance",
        "is_explained",
        "is_follow_up",
        "load_wait_s",
        "loading",
        "near",
        "number",
        "read",
        "request",
        "room",
        "runs",
        "ticket",
        "version",
        "wanted",
    )

    def __init__(
        self, request: TraceRequest, instance: Instance, *, number: int = 0, is_follow_up: bool
    ) -> None:
        self.request = request
        self.number = number
        self.arrived_s = request.at_s
        self.instance = instance
        self.is_follow_up = is_follow_up
        self.runs: list[Run] = []
        #: blocks found in all tiers, and those of them that cost no read
        self.found = self.near = 0
        #: leading blocks that are not computed, as far as it is known
        self.have = 0
        #: blocks that a load is to bring, and that came from storage in the end
        self.wanted = self.read = 0
        self.decision: Decision | None = None
        self.deadline: EarnedDeadline | None = None
        self.loading: Loading | None = None
        self.ticket: LoadTicket | None = None
        self.room: int | None = None
        #: for room; it does so once
        self.has_waited = False
        self.is_explained = False
        #: before the engine would have begun it in any case, when its load began
        self.idle_s = 0.0
        #: how long it waited for bytes with nothing else to do
        self.load_wait_s = 0.0
        #: when its front was begun, while its back is still read
        self.front_s = 0.0
        #: an event for an older one is void
        self.version = 0


class Instance:
    """One engine. Prefills are done one after the other, as they become ready."""

    def __init__(self, settings: SimSettings) -> None:
        block_bytes = settings.block_bytes
        self.device = LruBlocks(settings.device_bytes // block_bytes)
        self.host = LruBlocks(settings.host_bytes // block_bytes)
        self.room = HostAdmission(settings.host_bytes or 1 << 62)
        self.policies = Policies(admission=settings.admission)
        #: in the order of arrival: who waited for bytes has kept its place, as in real schedulers
        self.ready: list[tuple[float, int, Prompt]] = []
        #: in the order of their coming: those that wait for room in the host buffer
        self.for_room: deque[Prompt] = deque()
        self.current: Prompt | None = None
        self.busy_until_s = 0.0
        #: prefill that is promised to those who wait
        self.backlog_s = 0.0
        self.busy_s = 0.0
        if settings.is_trained:
            _train(self.policies, settings)

    def idle_s(self, now_s: float) -> float:
        """Before a prompt that comes now would be begun."""
        return max(self.busy_until_s - now_s, 0.0) + self.backlog_s


def find_runs(ids: list[int], instance: Instance, disk: LruBlocks, block_bytes: int) -> list[Run]:
    """The prefix that is somewhere, as runs of the nearest tier that has each block."""
    device, host, far = instance.device.ids, instance.host.ids, disk.ids
    runs: list[Run] = []
    tier, count = "", 0
    for block_id in ids:
        if block_id in device:
            place = "device"
        elif block_id in host:
            place = "host"
        elif block_id in far:
            place = "disk"
        else:
            break
        if place == tier:
            count += 1
            continue
        if count:
            runs.append(Run(tier, count, block_bytes if tier == "disk" else 0))
        tier, count = place, 1
    if count:
        runs.append(Run(tier, count, block_bytes if tier == "disk" else 0))
    return runs


def _train(policies: Policies, settings: SimSettings) -> None:
    """Let the policies know what a restart would know."""
    for tokens in (64, 512, 4096, 32_768):
        policies.cost.computed(tokens, 0, settings.prefill.seconds(tokens))
    for size in (1 << 20, 1 << 24, 1 << 28):
        span_s = settings.read_latency_s + size / settings.read_bytes_per_s
        policies.cost.loaded("disk", size, span_s)
