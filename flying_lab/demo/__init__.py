"""The demo: `python -m flying_lab.demo`."""
