"""Tests of the site are collected where its tools are."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("mkdocs") else ["test_*.py"]
