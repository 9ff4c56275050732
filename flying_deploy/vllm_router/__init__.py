"""Nodes behind vllm-router: `python -m flying_deploy.vllm_router`."""
