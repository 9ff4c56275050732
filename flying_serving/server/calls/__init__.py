"""Calls of engine utilities: orders to engines, and the answers of engines."""
