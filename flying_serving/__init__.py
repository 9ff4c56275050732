"""Flying Serving: an extension of vLLM whose parallelism changes while it serves."""

__version__ = "0.1.0"
