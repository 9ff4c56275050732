"""vLLM reads the same of this machine's CPUs."""

from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.utils.torch_utils import _cgroup_cpu_limit

from flying_serving.placement.topology import read_topology


def test_vllm_finds_the_same_on_this_machine() -> None:
    found = read_topology()
    assert found.nodes == {cpu.id: cpu.numa_node for cpu in get_allowed_cpu_list()}
    assert len(found.cores) == len({cpu.physical_core for cpu in get_allowed_cpu_list()})
    assert found.quota_cpus == _cgroup_cpu_limit()
