"""What tests and benchmarks share: servers to try, their clients, loads and losses. It imports
neither.

Servers and who asks them:

- `live.py`: a server as a user starts it. `forked.py`, `frozen.py`: its command, forked from a
  process that has imported vLLM. `preambles.py`: functions that run before it starts. `place.py`:
  on the CPU, or on one GPU. `nodes/`: nodes behind a router. `mock_server.py`: no engine.
- `streams.py`: streams as a client sees them. `lora.py`: the adapters that are asked for.
- `force.py`, `force_v2.py`: teacher forcing, on vLLM's two runners. `sampling_noise.py`: the noise
  of seeded requests. `paced.py`: steps that last as a test says. `both_ways.py`: both kinds of
  steps in turn. `not_packed.py`: weights as they are on CUDA.

Losses and loads:

- `losing.py`: how an engine is lost. `faulty_engines.py`, `wrong_lanes.py`, `apart.py`,
  `poison.py`: engines, lanes, tokens and memory that are wrong on purpose.
- `storm_load.py`, `storm_bounds.py`, `storm_losses.py`, `storm_report.py`: storms of switches.
- `chaos_load.py`, `chaos_traps.py`, `chaos_table.py`: engines that are killed at a named moment.

In place of what this machine lacks:

- `amx_cpu/`, `drafts_cpu/`, `experts_cpu/`, `fp8_cpu/`, `mxfp4_cpu/`, `triton_cpu/`,
  `gdn_cpu.py`, `int4_cpu.py`: kernels on any CPU. `no_torchvision/`: a library that is not needed.

For pytest:

- `examples.py`: how many examples property tests try. `entries.py`: what an object holds.
- `time_box.py`, `unit_time.py`, `not_run.py`: plugins for CI, for slow unit tests, for one GPU.
"""
