"""Flying Serving: an extension of vLLM whose parallelism changes while it serves.

Packages, from top to bottom; docs/architecture.md has more of each:

- `cli/`: commands. `server/`: the API server's part. `engine/`: the engine process.
- `migration/`: requests that continue in another group. `worker/`: a device of an engine.
- `weights/`: one copy of the weights. `vllm_adapter/`: what is replaced in vLLM, or wraps it.
- `controller/`: groups of requests, and switches. `memory/`: KV blocks. `comm/`: communicators.
- `policy/`: the layout. `scheduling/`: the next step. `predict/`: costs and forecasts.
- `layout/`: ranks and groups. `placement/`: cores. `observe/`: figures.

Files:

- `config.py`: settings of a server. `slo.py`: service level objectives.
- `wire.py`: types of engines' answers. `parallelism.py`: what a group divides in a step.
- `errors.py`: every exception. `start_error.py`: why an engine could not start.
- `validation.py`: errors of a setting. `phase.py`: phases of a thing. `log.py`: the one logger.
- `version.py`: the version of this package.
"""

from flying_serving.version import VERSION as __version__

__all__ = ["__version__"]
