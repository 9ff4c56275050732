"""Commands of `flying-serving`, and the helpers that they share."""
