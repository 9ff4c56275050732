"""The cores and the number of threads of each device of an engine on the CPU.

- `topology.py`: the CPUs that this process may use, and the CPU time of its cgroup.
- `plan.py`: the place of each device, which its process takes by `Placement.bind`.
"""
