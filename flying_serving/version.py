"""The version of this package, which pyproject.toml reads."""

VERSION = "0.1.0"
