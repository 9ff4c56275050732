"""Exceptions of the laboratory, in the tree of flying_serving.errors."""

from flying_serving.errors import FlyingError


class BenchError(FlyingError):
    """A server that cannot be measured, or results that cannot be read or written."""


class WorkloadError(FlyingError, ValueError):
    """A column of a trace (`file`; `line` from 1, None for all of it) or a parameter of a workload
    that is not usable.
    """

    def __init__(
        self,
        field: str,
        value: object,
        allowed: str,
        *,
        file: str | None = None,
        line: int | None = None,
    ) -> None:
        place = "" if file is None else f"{file}: " if line is None else f"{file}:{line}: "
        shown = repr(value)
        super().__init__(
            f"{place}{field}={shown[:200]}{'...' if len(shown) > 200 else ''}: {allowed}"
        )
        self.field = field
        self.value = value
        self.allowed = allowed
        self.file = file
        self.line = line
