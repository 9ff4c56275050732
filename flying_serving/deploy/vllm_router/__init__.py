"""Nodes behind vllm-router: `python -m flying_serving.deploy.vllm_router`."""
