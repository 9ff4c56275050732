"""Commands of `flying-serving`."""
