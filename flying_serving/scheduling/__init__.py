"""The choice of an engine's next step: its lane, and its number of prompt tokens. Pure."""
