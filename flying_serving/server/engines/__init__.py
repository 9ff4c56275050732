"""The life of engines: processes, losses and returns, and the end of the server.

- `supervisor.py`: the steps of a loss and of a return, and the registers of lost engines.
- `liveness.py`, `starter.py`: what kills silent engines; a new start.
- `processes.py`: a process that is watched, and the parent that forks another one.
- `shutdown.py`: the end of the server, in which requests may end first.

docs/architecture.md has the way of a lost engine, file by file, and docs/design/faults.md the
rules.
"""
