"""Another process that stores into a pool as fast as the pool takes it, until it is killed.

Started by `do_no_harm`; no benchmark of its own.
"""

from __future__ import annotations

import itertools
import sys

from kvdepot.config import PoolConfig
from kvdepot.keys import BlockKey
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import toy_identity
from kvdepot.tiers import Write

_BLOCK_BYTES = 128 * 1024


def main() -> None:
    identity = toy_identity([_BLOCK_BYTES], model_name="storm")
    data = memoryview(bytearray(_BLOCK_BYTES))
    with PoolTier.open(PoolConfig.of(sys.argv[1]), identity) as tier:
        print("ready", flush=True)
        for number in itertools.count():
            keys = [BlockKey(f"{number:08d}-{n:02d}".encode().ljust(32, b"s")) for n in range(64)]
            parents = [BlockKey(bytes(32)), *keys[:-1]]
            writes = [Write(k, p, data, 16) for k, p in zip(keys, parents, strict=True)]
            tier.store(writes).wait_settled(10.0)


main()
