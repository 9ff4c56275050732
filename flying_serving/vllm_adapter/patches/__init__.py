"""The names of vLLM that are replaced: `table.py` declares them, `installer.py` checks them."""
