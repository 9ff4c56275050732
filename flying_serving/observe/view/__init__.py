"""The live view: rates of the last seconds, and its page."""
