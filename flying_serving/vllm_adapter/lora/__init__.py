"""vLLM's adapters (LoRA).

- `engine_adapters.py`: the adapters of an engine.
- `files.py`: the files of an adapter, read once. `numbers.py`: its numbers, which must be finite.
- `notes.py`: notes that processes leave for each other, as the digest of an adapter.
- `layers.py`: vLLM's wrappers around the layers of each lane.
- `requests.py`: a scheduler's requests with adapters. `scheduler.py`: its steps with them.
"""
