"""The live view: rates of the last seconds, a page, a terminal."""
