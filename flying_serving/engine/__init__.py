"""The engine process.

- `core.py`, `build.py`: vLLM's engine core with lanes, and how it is put together.
- `loop.py`: one round: which lane steps (`scheduling/arbiter.py` decides), and messages between.
- `lane.py`, `group.py`: lanes of an engine; the leader and the members of a group.
- `requests.py`, `utilities.py`, `report.py`: requests that come, calls of the API server, figures.
- `channel.py`, `messages.py`, `membership.py`: messages between engines; which engines are there.
- `lending.py`, `residency.py`: blocks that lanes lend each other; weights that are lent to KV.
"""
