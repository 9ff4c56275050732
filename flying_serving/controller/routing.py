"""Where a request goes in the present layout (policy `manual`): pure bookkeeping over layout, capacity and load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flying_serving.controller.capacity import Capacity
from flying_serving.errors import RequestError
from flying_serving.layout.groups import Group, Layout


@dataclass(frozen=True)
class Wanted:
    """What routing knows of a request.

    Args:
        tokens: prompt and max_tokens together, at most the model's length.
        degree: the TP degree that it asks for (`tp_degree`), or None.
    """

    tokens: int
    degree: int | None = None


class Router:
    """Least loaded group that suits; what suits no present group waits for a layout that does.

    Args:
        layout: the present layout.
        capacity: what each group size holds.
    """

    def __init__(self, layout: Layout, capacity: Capacity) -> None:
        self.layout = layout
        self.capacity = capacity
        self.load: Counter[Group] = Counter()
        self._engines = sum(map(len, layout.groups))
        self._group_of: dict[str, Group] = {}

    def check(self, wanted: Wanted) -> None:
        """Raise RequestError if no layout of this server can ever run it; the message says what would do."""
        if wanted.degree is not None and wanted.degree not in self.capacity.degrees:
            raise RequestError(f"tp_degree={wanted.degree}: must be one of {self.capacity.degrees}")
        sizes = self.capacity.fitting_sizes(wanted.tokens)
        if wanted.degree is not None:
            size = wanted.degree // self.capacity.devices
            if size not in sizes:
                holds = self.capacity.tokens[size]
                enough = [self.capacity.degree(s) for s in sizes]
                hint = f"degree {enough[0]} would do" if enough else "no degree of this server holds them"
                raise RequestError(
                    f"tp_degree={wanted.degree}: its KV cache holds {holds} tokens, prompt plus max_tokens are "
                    f"{wanted.tokens}; {hint}"
                )
        elif not sizes:
            widest = max(self.capacity.tokens)
            raise RequestError(
                f"prompt plus max_tokens are {wanted.tokens} tokens; the widest group (degree "
                f"{self.capacity.degree(widest)}) holds {self.capacity.tokens[widest]}"
            )

    def place(self, wanted: Wanted) -> Group | None:
        """The group that should run it now, or None if no group of the present layout suits.

        A degree that is asked for is met exactly: by a present group if there is one, else by any group of that size,
        whose steps are then woven into the present layout's (every engine keeps a lane for each size).
        """
        sizes = self.capacity.fitting_sizes(wanted.tokens)
        if wanted.degree is None:
            groups = [group for group in self.layout.groups if len(group) in sizes]
        else:
            size = wanted.degree // self.capacity.devices
            every = Layout.uniform(self._engines, size).groups
            groups = [group for group in self.layout.groups if len(group) == size] or list(every)
        if not groups:
            return None
        return min(groups, key=lambda group: (self.load[group] / len(group), self.load[group], group))

    def started(self, request_id: str, group: Group) -> None:
        """The request runs in `group` from now on."""
        self._group_of[request_id] = group
        self.load[group] += 1

    def finished(self, request_id: str) -> Group | None:
        """The request is over. Returns where it ran, or None if it did not run."""
        group = self._group_of.pop(request_id, None)
        if group is not None:
            self.load[group] -= 1
            if not self.load[group]:
                del self.load[group]
        return group

    def group_of(self, request_id: str) -> Group | None:
        """Where the request runs."""
        return self._group_of.get(request_id)

    def draining(self, layout: Layout) -> set[str]:
        """Requests that run in groups which `layout` does not have."""
        return {request for request, group in self._group_of.items() if group not in layout.groups}

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._group_of)
