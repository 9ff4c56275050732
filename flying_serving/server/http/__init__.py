"""HTTP: the routes that this package adds to vLLM's, and the gate that each request passes."""
