"""The engine process: its loop, groups, messages and lane arbiter."""
