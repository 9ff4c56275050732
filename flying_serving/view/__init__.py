"""The live view: what it shows, as JSON, as a page and in a terminal. Neither torch nor vLLM."""
