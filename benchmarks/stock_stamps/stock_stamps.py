"""A vLLM plugin: stock vLLM with the time stamps of `benchmarks.group_stamps`.

vLLM loads it in its engine core and in each worker.
"""

from benchmarks.group_stamps import install_stock


def register() -> None:
    """Stamp the steps of this process, and what its scheduler does."""
    install_stock()
