"""The demo: `python -m flying_serving.demo`."""
