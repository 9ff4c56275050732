"""vLLM's adapters (LoRA): files, numbers, layers, requests, and those of an engine."""
