"""vLLM's model runner in a lane: V1 and V2, steps, graphs, compiled code, random numbers."""
