"""Files in which processes meet: of groups of engines, and of one engine's devices, for each of
their incarnations.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from flying_serving.config import Deployment
from flying_serving.layout.groups import Group, aligned_group


def whole_groups(
    engine: int, sizes: Iterable[int], incarnations: Sequence[int | None]
) -> Iterator[tuple[Group, list[int]]]:
    """Yield an engine's groups of these sizes that lack no member, each with the incarnations of
    its members.

    `incarnations`: by engine; None: it is lost.
    """
    for size in sizes:
        group = aligned_group(engine, size)
        there = [number for member in group if (number := incarnations[member]) is not None]
        if len(there) == size:
            yield group, there


def group_file(
    directory: str, group: Group, incarnations: Iterable[int], device: int | None = None
) -> str:
    """Return the file of a group whose engines, in this order, have these incarnations. `device`:
    of each of them, if they meet there without their other devices.
    """
    devices = "" if device is None else f"-device{device}"
    return f"{directory}/lane{len(group)}-{group[0]}-{'.'.join(map(str, incarnations))}{devices}"


def world_file(deployment: Deployment, engine: int) -> str:
    """Return the file through which the devices of an engine meet as a torch world, in the
    incarnation that `deployment` says.
    """
    return f"{deployment.run_dir}/world-{engine}-{deployment.incarnations[engine]}"


def forget_worlds(directory: str, engine: int) -> None:
    """Remove the files of an engine's torch worlds: all of its processes have ended."""
    for path in Path(directory).glob(f"world-{engine}-*"):
        path.unlink(missing_ok=True)


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
