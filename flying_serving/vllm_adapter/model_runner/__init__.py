"""A lane on a device: its steps by vLLM's model runner, V1 or V2.

- `device_lane.py`: the lane. `versions.py`: all in which V1 and V2 differ.
- `configuration.py`: the `VllmConfig` of a lane.
- `graphs.py`, `compiled.py`: CUDA graphs and torch.compile in lanes.
- `randomness.py`: random numbers for requests without a seed.
- `token_parallel.py`: token parallel steps. `rank_widths.py`: activations whose result depends on a
  rank's columns.
- `made_up_steps.py`: steps of made-up requests. `stages.py`: parts of a model whose outputs can be
  compared.
"""
