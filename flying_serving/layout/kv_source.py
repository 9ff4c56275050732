"""The KV of a request in a group, as other groups find it."""

from dataclasses import dataclass

from flying_serving.layout.groups import Group


@dataclass(frozen=True)
class KVSource:
    """The KV of one request in a group, whose leader offers it under this number to other groups.

    The number is unique in the life of the server.
    """

    group: Group
    number: int
