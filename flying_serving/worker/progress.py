"""Phases of an engine's start, a log line for each: a long start shows which engine waits where."""

from flying_serving.log import logger


def phase(engine: int, device: int, what: str) -> None:
    """Say that an engine begins a phase; the first device speaks for all."""
    if device == 0:
        logger.info("engine %d: %s", engine, what)
