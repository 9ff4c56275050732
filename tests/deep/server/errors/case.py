"""A wrong use and its answer: a row of docs/errors.md."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One wrong use and its answer."""

    what: str
    says: str
    """What the answer contains, on one line."""
    code: int = 400
    send: Any = field(default_factory=dict, hash=False)
    """What makes it: flags, settings or a body, see each table."""

    in_stream: bool = False
    """A streamed request begins with 200 all the same, and the error is its first event."""

    @property
    def row(self) -> str:
        """The row of the document."""
        return f"| {self.what} | {self.code} | `{self.says}` |"
