"""What is replaced in vLLM, and what wraps it, by vLLM's own subsystems.

- `patches/`: names of vLLM that are replaced; `patches/table.py` lists every one, with its reason.
- `model_runner/`, `scheduler/`, `kv/`, `weights/`, `distributed/`: of an engine.
- `lora/`, `speculation/`, `recurrent/`: kinds of requests and models. `request_kinds.py`: where the
  rest of an engine meets them.
- `api_server/`, `processes/`: the server's side, and the processes of engines.
- `cpu_build/`: corrections of vLLM's build for the CPU.
- `keys.py`: notes that a request carries to its engine. `assigned.py`: context variables for hooks.

Other rooms import vLLM for what they subclass or call as a user of it would: its engine core, its
workers, layers of its models, its API server. `tests/house/test_imports.py` lists them.
Hooks that call the server are handed to the table from above (`server/patches.py`).
"""
