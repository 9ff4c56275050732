"""vLLM's scheduler in a lane.

- `scheduler.py`: the scheduler: it tells the engine of its steps, and limits prompts.
- `step_contents.py`: the contents of a step. `limits.py`: the requests that the next one serves.
- `priorities.py`: priority scheduling, with priorities that change.
- `history.py`: requests that go on in another group.
- `beginnings.py`, `failures.py`: messages to the API server: a request with a deadline has begun; a
  request has ended with an error.
"""
