"""The engine process.

- `core.py`, `build.py`: vLLM's engine core with lanes, and how it is put together.
- `loop.py`: one round: which lane steps (`scheduling/arbiter.py` decides), and messages between.
  `host.py`: the surroundings of a loop: vLLM's engine, and the channel.
- `lane.py`, `group.py`: lanes of an engine; the leader and the members of a group.
  `lane_events.py`: an engine's actions at each event of a lane's scheduler.
- `group_steps.py`, `outstanding.py`: steps of groups: launched, and outstanding until their output
  is taken. `sampled.py`: the tokens that members sample, which must be the leader's.
- `requests.py`, `aging.py`: the lane of a request that comes, and its place in the queue.
- `utilities.py`, `caches.py`, `ending.py`: calls of the API server; resets of prefix caches; the
  end of an engine.
- `report.py`, `step_log.py`, `tracing.py`: counts, times of steps, the trace.
- `channel.py`, `messages.py`, `membership.py`: messages between engines; which engines are there.
- `block_lending.py`: blocks that lanes lend each other.
"""
