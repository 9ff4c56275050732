"""Before the engines start: checks of flags, the description of the deployment, the run
directory.

- `launch.py`: a deployment of engines with lanes, from vLLM's configuration.
- `settings.py`: the controller's settings, from vLLM's configuration and ours.
- `capabilities.py`: the table of what a start is refused for.
- `support.py`: refusals of a missing model, an unusable address, group sizes that a model does not
  admit.
- `inspection.py`: errors of vLLM's configuration, in one line.
- `defaults.py`: vLLM's flags whose defaults differ here.
- `environment.py`: refusals of variables of the environment.
- `front_ends.py`: refusals of flags that lead around this API server.
- `execution.py`: steps as they are, compiled, or as CUDA graphs.
- `experts.py`: the kernel of routed experts on a GPU.
- `devices.py`: devices of the engines, and how they exchange tensors.
- `cores.py`: cores of the CPU, in `doctor`'s table.
- `interrupts.py`: SIGTERM and interrupts while engines start.
- `rundir.py`: the run directory.
"""
