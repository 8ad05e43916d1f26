"""Import this before vLLM: it skips the module where vLLM is not installed.

vLLM and torch warn while they are imported, and our tests take each warning for an error.
"""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
    import vllm.engine.arg_utils
    import vllm.v1.kv_offload.tiering.spec  # noqa: F401
