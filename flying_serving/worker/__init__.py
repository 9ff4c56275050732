"""A device of an engine: its lanes, and checks at start.

- `worker.py`: vLLM's worker, which makes the lanes. `placed.py`: its cores.
- `lanes.py`, `lane.py`: all lanes of a device; one lane. An engine calls `WorkerLanes`.
- `admission.py`: the group sizes that a model admits, before any engine starts.
- `checks.py`, `selfcheck.py`, `token_check.py`, `compiled.py`, `graphs.py`: at start, lanes are
  compared with lane 1. `calibration.py`: steps are measured.
- `parent.py`: the bond to the server's process.
"""
