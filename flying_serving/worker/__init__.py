"""A device of an engine: its lanes, and checks at start.

- `worker.py`: vLLM's worker, which makes the lanes.
- `lanes.py`: all lanes of a device, and what they share. A `DeviceLane` is in
  `vllm_adapter/model_runner/device_lane.py`.
- `weightless_model.py`: what a model tells before any engine starts, as the group sizes that it
  admits. `refusals.py`: models that are refused once their layers are there.
- `checks.py`, `selfcheck.py`, `token_check.py`, `compiled.py`, `graphs.py`: at start, lanes are
  compared with lane 1. `calibration.py`: steps are measured.
- `contexts.py`, `memory_items.py`: on CUDA: contexts on the devices of peers; what a start takes of
  a device's memory.
- `parent.py`: the bond to the server's process.
"""
