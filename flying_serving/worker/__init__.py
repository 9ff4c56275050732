"""A device of an engine: its lanes, the binding of their weights, and checks at start.

- `worker.py`: vLLM's worker, which makes the lanes. `placed.py`: its cores.
- `lanes.py`, `lane.py`: all lanes of a device; one lane. An engine calls `WorkerLanes`.
- `kv_views.py`: the KV of the lanes, for each kind of layers.
- `binding/`: one copy of the weights for all lanes.
- `residency.py`, `lent.py`: the weights that are resident; the calls that drop and fetch them.
- `admission.py`: the group sizes that a model admits, before any engine starts.
- `selfcheck.py`, `calibration.py`: at start, lanes are compared with lane 1, and steps measured.
- `parent.py`, `heap.py`: the bond to the server's process; memory of the C heap.
"""
