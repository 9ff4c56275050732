"""The API server's part: vLLM's HTTP server with our engine client, and the controller's shell.

- `plugin.py`, `patches.py`: where vLLM calls this package.
- `start/`: flags are checked, and engines are described, before they start.
- `http/`: routes, and the gate that each request passes.
- `requests/`: a request is checked, and becomes a stream of tokens.
- `client.py`, `shell.py`, `clock.py`: vLLM's engine client, the controller's shell, and its ticks.
- `metrics.py`: what `/metrics` shows.
- `calls/`: engines are asked and told something.
- `engines/`: an engine is lost, and is started again; the server ends.
- `figures/`: samples for `/metrics`, `/flying/status`, the live view and traces.
"""
