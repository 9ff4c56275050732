"""The life of engines: processes, losses and returns, and the end of the server.

- `supervisor.py`: the steps of a loss and of a return, and the registers of lost engines.
- `record.py`: the phases of an engine.
- `liveness.py`, `peer_notices.py`, `departures.py`, `starter.py`: the steps of the supervisor.
- `processes.py`: a process that is watched, and the parent that forks another one.
- `shutdown.py`: the end of the server, in which requests may end first.

The way of a lost engine, file by file:

1. `supervisor.py`: `_ended` sees the end of the process. `liveness.py` ends a silent one.
2. `supervisor.py`: `_lose` makes an entry in each register, and fails calls of the engine.
3. `peer_notices.py`: tells the other engines. `engine/membership.py`: they dissolve its groups.
4. `controller/fault_recovery.py`: `engines_lost` has its requests run elsewhere.
5. `departures.py`: a start waits until no process of the engine holds memory.
6. `starter.py`: has `processes.py` fork another process, and `vllm_adapter/restart.py` connect it.
7. `engine/core.py`: the engine starts, and says that it is ready.
8. `supervisor.py`: `_join` tells the other engines, then `engine_back` of the controller.
"""
