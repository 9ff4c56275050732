"""All contact with vLLM's internals: `table.py` lists every patched name, the other modules hold the hooks."""
