"""Costs of steps, arrivals, and forecasts from both: pure.

- `steps.py`, `probes.py`: the time of a step in each lane, fitted while serving; steps that a
  server measures at its start.
- `parallelism.py`: what a group's engines divide in a step: the cost of token parallel steps, the
  choice.
- `migrations.py`: the time in which KV of requests goes to another group.
- `arrivals.py`, `events.py`, `demand.py`: the rate of arrivals; requests that come together; the
  lengths of prompts and outputs. `lifetimes.py`: lengths of outputs, also of requests that run.
- `work.py`: the inputs of a forecast.
- `step_times.py`, `rollout.py`, `forecast.py`: the steps of one group; the group as a fluid model;
  the request-seconds of a layout.
"""
