"""The replaced names of vLLM: `table.py` declares them, `installer.py` checks them."""
