"""The API server's part: vLLM's HTTP server with our engine client, and the controller's shell.

- `plugin.py`, `patches.py`: where vLLM calls this package.
- `start/`: checks flags and describes engines, before they start.
- `http/`: routes, and the gate that each request passes.
- `requests/`: checks a request, and turns it into a stream of tokens.
- `client.py`, `shell.py`, `clock.py`: vLLM's engine client, the controller's shell, and its ticks.
- `metrics.py`: the contents of `/metrics`.
- `calls/`: calls of engine utilities, which ask engines or tell them something.
- `engines/`: the loss of an engine and its new start; the end of the server.
- `figures/`: samples for `/metrics`, `/flying/status`, the live view and traces.

The way of a request to an engine, file by file:

1. `http/gate.py`: the checks before any route of vLLM.
2. `patches.py`: `check_before_stream`, around vLLM's `generate`.
3. `requests/checks.py`: `let_in` refuses the request, or holds a place for it.
4. `client.py`: vLLM calls `add_request_async`.
5. `shell.py`: `add` tells the controller that the request has arrived.
6. `controller/controller.py`: `arrived` puts it into the task pool.
7. `controller/dispatcher.py`: `place_waiting` offers it the groups of the layout.
8. `controller/group_choice.py`: `choose` returns the best of them.
9. `controller/bookings.py`: `start` books the request there. The answer is the command `Dispatch`.
10. `requests/streams.py`: `dispatch` makes the message, which `carry_out` of the shell sends.
11. `engine/core.py`: `add_request` takes it, in the process of the group's leader.

Its tokens come back by `process_engine_outputs` of the client, which calls `take` of the shell.
"""
