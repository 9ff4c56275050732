"""Commands of `flying-serving` that measure, draw or simulate."""
