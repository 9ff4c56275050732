"""The API server's part: vLLM's HTTP server with our engine client, and the controller's shell.

- `plugin.py`, `patches.py`: where vLLM calls this package.
- `start/`: checks flags and describes engines, before they start.
- `http/`: routes, and the gate that each request passes.
- `requests/`: checks a request, and turns it into a stream of tokens.
- `client.py`, `shell.py`, `clock.py`: vLLM's engine client, the controller's shell, and its ticks.
- `own_thread.py`: work that may take for ever, in threads of its own.
- `metrics.py`: the contents of `/metrics`.
- `calls/`: calls of engine utilities, which ask engines or tell them something.
- `engines/`: the loss of an engine and its new start; the end of the server.
- `engine_record.py`: the phase of each engine, and whether it is lost.
- `figures/`: samples for `/metrics`, `/flying/status`, the live view and traces.

docs/architecture.md has the way of a request, file by file.
"""
