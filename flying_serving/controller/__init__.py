"""Decisions, pure: where a request goes, what a switch did. Neither torch nor vLLM; time is an argument."""
