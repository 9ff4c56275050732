"""Files in which processes meet: of groups of engines, and of one engine's devices, for each of
their incarnations.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from flying_serving.layout.groups import Group, whole_groups


def group_file(
    directory: str, group: Group, incarnations: Iterable[int], device: int | None = None
) -> str:
    """Return the file of a group whose engines, in this order, have these incarnations. `device`:
    of each of them, if they meet there without their other devices.
    """
    devices = "" if device is None else f"-device{device}"
    return f"{directory}/lane{len(group)}-{group[0]}-{'.'.join(map(str, incarnations))}{devices}"


def world_file(directory: str, engine: int, incarnation: int) -> str:
    """Return the file through which the devices of an engine with this incarnation meet as a torch
    world.
    """
    return f"{directory}/world-{engine}-{incarnation}"


def forget_groups(
    directory: str, engine: int, sizes: Iterable[int], incarnations: Sequence[int | None]
) -> None:
    """Remove all files of an engine's groups: it is lost, maybe with all others of a group, or its
    start has failed.

    `incarnations`: of all engines as it knew them; None: lost.
    """
    for group, there in whole_groups(engine, sizes, incarnations):
        of_all = Path(group_file(directory, group, there))
        for path in (of_all, *of_all.parent.glob(f"{of_all.name}-device*")):
            path.unlink(missing_ok=True)
