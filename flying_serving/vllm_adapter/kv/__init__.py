"""vLLM's KV cache in a lane: its memory, blocks, heads, windows, and views for migration."""
