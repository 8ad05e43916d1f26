"""How a simulated prompt ends: what of it is kept, and why its reuse ended where it did."""

from __future__ import annotations

from kvdepot.policy.reasons import Explanation, Reason
from kvdepot.sim.caches import LruBlocks
from kvdepot.sim.instance import Prompt
from kvdepot.sim.settings import SimSettings

__all__ = ["explain", "keep", "note"]


def keep(prompt: Prompt, disk: LruBlocks, settings: SimSettings, now_s: float) -> int:
    """Its blocks are in the engine's memory now, and go to storage if admitted; bytes written."""
    instance, ids = prompt.instance, list(prompt.request.block_ids)
    instance.device.use(ids)
    instance.host.use(ids)
    if not disk.capacity:
        return 0
    present = next((place for place, each in enumerate(ids) if each not in disk.ids), len(ids))
    admission = instance.policies.admission
    admitted = len(ids)
    if not admission.is_always:
        admitted = (
            present
            + admission.admit(
                now_s,
                [_key(each) for each in ids[present:]],
                settings.block_bytes,
                prompt_tokens=prompt.request.input_tokens,
            ).blocks
        )
    written = disk.use(ids[:admitted]) * settings.block_bytes
    instance.policies.write_only.stored(written)
    return written


def note(prompt: Prompt, reason: Reason, block: int) -> None:
    """Its reuse ended at this block."""
    prompt.is_explained = True
    blocks = len(prompt.request.block_ids)
    prompt.instance.policies.misses.note(Explanation(reason, block, blocks))


def explain(prompt: Prompt) -> None:
    """Give it its one reason, if it has none yet."""
    if prompt.is_explained:
        return
    blocks = len(prompt.request.block_ids)
    choice = prompt.decision.choice if prompt.decision is not None else None
    if not blocks:
        note(prompt, Reason.TOO_SHORT, 0)
    elif choice is not None and choice.reason is not None and choice.blocks < prompt.found:
        note(prompt, choice.reason, choice.blocks)
    elif prompt.found < blocks:
        note(prompt, Reason.NEVER_STORED, prompt.found)
    else:
        prompt.instance.policies.misses.note(None)


def _key(block_id: int) -> bytes:
    """A key of 16 mixed bytes for the filters of admission."""
    low = (block_id + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    high = (low ^ low >> 31) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return low.to_bytes(8, "little") + high.to_bytes(8, "little")
