"""Flying Serving: an extension of vLLM whose parallelism changes while it serves."""

from flying_serving.version import VERSION as __version__

__all__ = ["__version__"]
