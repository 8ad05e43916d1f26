"""What changes a request's KV beyond its tokens, as far as vLLM's hashes do not tell it.

vLLM hashes an adapter's name and path, not its content, and takes an image's id from the client where
one is given. A pool outlives both: the same name may come back with other weights, and the same id with
another picture. So the content of an adapter enters the keys, and a request with ids that are no digests
is not cached. Tenant salts and prompt embeddings are in vLLM's hashes, by content.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from typing import Any, NamedTuple

from kvdepot.clock import Clock
from kvdepot.identity import UNDETERMINED
from kvdepot.io.modelfolder import file_states, local_model_folder
from kvdepot.io.weights import weights_fingerprint

__all__ = ["AdapterCheck", "AdapterDigests", "has_known_images", "has_steady_keys"]

log = logging.getLogger(__name__)

#: a request waits so long for a look at its adapter's files, and is computed and not kept after that; a
#: look takes a millisecond, and many times that beside a busy thread of the engine's
_PATIENCE_S = 0.5
#: what vLLM's hashers make: 256 or 512 bits
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")


def has_known_images(request: Any) -> bool:
    """Whether each image (or other input that is no text) of a request is named by its content."""
    return all(
        isinstance(feature.mm_hash, str)
        and _DIGEST.fullmatch(feature.mm_hash) is not None
        and feature.mm_hash in str(feature.identifier)
        for feature in request.mm_features or ()
    )


def has_steady_keys(request: Any) -> bool:
    """Whether a request's chunks keep the keys that vLLM makes first.

    A session of streamed input takes its last token back when more input comes, and the chunk that
    ended with it keeps the key of what it does not hold.
    """
    return not request.resumable


class _Seen(NamedTuple):
    """An adapter's files as they were when vLLM met it first."""

    states: object
    #: None once they have changed
    digest: bytes | None


class AdapterCheck:
    """One request's question for its adapter's content. Written by the thread that looks."""

    __slots__ = ("_give_up_at_s", "digest", "is_over", "name", "number", "path")

    def __init__(self, adapter: Any, give_up_at_s: float) -> None:
        self.name: str = adapter.lora_name
        self.number: int = adapter.lora_int_id
        self.path: str = adapter.lora_path
        #: None if it is over and not known
        self.digest: bytes | None = None
        self.is_over = False
        self._give_up_at_s = give_up_at_s

    def is_late(self, now_s: float) -> bool:
        """It is not answered, and nobody waits for it any more."""
        return not self.is_over and now_s >= self._give_up_at_s

    def is_pending(self, now_s: float) -> bool:
        """It may still be answered, and there is time to wait for it."""
        return not self.is_over and now_s < self._give_up_at_s


class AdapterDigests:
    """Digests of adapters' files, made and checked on a thread of their own.

    vLLM loads an adapter when it first meets it, and again whenever it had no room to keep it. So an
    adapter whose files have changed since the first look may be either, and is not cached until the
    engine is started anew.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, int, str], _Seen] = {}
        self._questions: queue.SimpleQueue[AdapterCheck] = queue.SimpleQueue()
        self._last: AdapterCheck | None = None
        self._thread: threading.Thread | None = None

    def check(self, adapter: Any) -> AdapterCheck:
        """Have somebody look at an adapter's files. Returns at once."""
        now_s = self._clock.monotonic_s()
        # while one look hangs, nobody waits for the next
        is_stuck = self._last is not None and self._last.is_late(now_s)
        check = AdapterCheck(adapter, now_s if is_stuck else now_s + _PATIENCE_S)
        self._last = check
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvdepot-lora", daemon=True)
            self._thread.start()
        self._questions.put(check)
        return check

    def _run(self) -> None:
        while True:
            check = self._questions.get()
            try:
                check.digest = self._digest(check)
            except Exception as error:  # noqa: BLE001 (not known is an answer)
                log.warning("adapter %s is not cached: %s", check.name, error)
            check.is_over = True

    def _digest(self, check: AdapterCheck) -> bytes | None:
        folder = local_model_folder(check.path, revision=None, cache_dir=None)
        if folder is None:
            log.warning("adapter %s is not cached: no folder %s here", check.name, check.path)
            return None
        key = (check.name, check.number, check.path)
        seen = self._seen.get(key)
        states = file_states(folder)
        if seen is None:
            fingerprint = weights_fingerprint(folder)
            is_steady = file_states(folder) == states and fingerprint != UNDETERMINED
            seen = _Seen(states, bytes.fromhex(fingerprint) if is_steady else None)
        elif seen.digest is not None and seen.states != states:
            log.warning(
                "adapter %s is not cached any more: its files have changed while it is in use "
                "(hint: start the engine anew, or give it another name or path)",
                check.name,
            )
            seen = seen._replace(digest=None)
        self._seen[key] = seen
        return seen.digest
