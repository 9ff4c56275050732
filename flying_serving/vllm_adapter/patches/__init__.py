"""The names of vLLM that are replaced in a process: `table.py` declares all of them, `installer.py` checks them."""
