"""All contact with vLLM's internals: `table.py` lists every patched name, the other modules hold
the hooks.

Hooks that call the server are handed to the table from above (`server/patches.py`).
"""
