"""vLLM's API server.

- `parser.py`: its parser of flags.
- `client.py`: its start of engines, and requests that its engine client refuses.
- `client_channel.py`: its engine client: messages to engines, answers, the queue of outputs.
- `stats.py`: its statistics of outputs, for the live view.
"""
