"""A vLLM plugin for a baseline: stock tensor parallelism with gloo, also where vLLM has
shared-memory collectives.

vLLM's CPU wheel has them for AVX-512 machines alone. The folder is found through PYTHONPATH and
VLLM_PLUGINS.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def register() -> None:
    """Let every group find that its ranks do not share a shared-memory group, vLLM's own reason to
    use gloo.
    """
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
