"""vLLM: the pool as a secondary tier under its offloading connector, on GPUs and on CPUs.

vLLM loads the classes of this package by name; nothing of vLLM is patched. Only the modules here import
it, and this one does not, so that its constants can be read where vLLM is not installed.
"""

from __future__ import annotations

__all__ = ["CONNECTOR", "CPU_SPEC", "GPU_SPEC", "TIER"]

#: (class name, module) as vLLM's settings name them
CONNECTOR = ("KvdepotConnector", "kvdepot.engines.vllm.connector")
TIER = ("KvdepotTier", "kvdepot.engines.vllm.tier")
#: vLLM's own spec does for GPUs; its CPU build needs another copy worker
GPU_SPEC = ("TieringOffloadingSpec", None)
CPU_SPEC = ("CpuTieringSpec", "kvdepot.engines.vllm.cpu_spec")
