"""Emulated devices: real engines, schedulers, KV blocks and HTTP, on devices that are not there.

- `profile.py`: the devices of an engine, and the seconds of its steps by the cost model.
- `step_contents.py`: the work of a step of vLLM's scheduler.
- `runner.py`, `worker.py`: a model runner that waits as long as its profile says.
- `stand_in.py`: the tiny model on disk, whose KV blocks stand for those of the profile's model.
- `command.py`: the command line of a server on emulated devices, ours or stock vLLM.
- `slowed.py`: the same devices in the simulator.

Nothing is computed: a token follows from its request and its place. A measurement here is one of
scheduling, and not of a model.
"""

MODULE = "flying_lab.emulation"
"""Of servers on emulated devices, ours and stock vLLM: `python -m`."""
