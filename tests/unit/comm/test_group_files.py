"""Files in which groups share memory: which are an engine's whose start has failed."""

from pathlib import Path

from flying_serving.comm.group_files import (
    forget_groups,
    forget_worlds,
    group_file,
    whole_groups,
    world_file,
)
from flying_serving.config import Deployment, FlyingConfig

SIZES = (1, 2, 4)


def test_only_files_of_the_failed_start_are_removed(tmp_path: Path) -> None:
    """Groups that lack a member have none."""
    files = {
        Path(group_file(str(tmp_path), group, incarnations))
        for group, incarnations in [
            ((0, 1), (0, 3)),
            ((0, 1), (0, 2)),
            ((2, 3), (0, 0)),
            ((0, 1, 2, 3), (0, 3, 0, 0)),
        ]
    }
    files |= {Path(group_file(str(tmp_path), (0, 1), (0, 3), device)) for device in (0, 1)}
    files |= {Path(group_file(str(tmp_path), (0, 1), (0, 31), 0))}
    for file in files:
        file.touch()
    forget_groups(str(tmp_path), 1, SIZES, [0, 3, None, 0])
    assert {file.name for file in tmp_path.iterdir()} == {
        "lane2-0-0.2",
        "lane2-0-0.31-device0",
        "lane2-2-0.0",
        "lane4-0-0.3.0.0",
    }
    forget_groups(str(tmp_path), 1, SIZES, [0, 3, 0, 0])
    assert {file.name for file in tmp_path.iterdir()} == {
        "lane2-0-0.2",
        "lane2-0-0.31-device0",
        "lane2-2-0.0",
    }


def test_groups_that_lack_a_member_are_not_whole() -> None:
    """Others have the incarnations of their members, in order."""
    assert list(whole_groups(3, (1, 2, 4), (0, None, 5, 2))) == [((3,), [2]), ((2, 3), [5, 2])]
    everyone = list(whole_groups(1, (1, 2, 4), (0, 1, 5, 2)))
    assert everyone == [((1,), [1]), ((0, 1), [0, 1]), ((0, 1, 2, 3), [0, 1, 5, 2])]


def test_worlds_of_an_engine_that_has_ended_are_removed(tmp_path: Path) -> None:
    """Of all of its incarnations; those of others stay."""
    flying = FlyingConfig()
    made = Deployment(run_dir=str(tmp_path), engines=2, devices=2, group_sizes=(1,), flying=flying)
    for incarnations in ((0, 0), (0, 1)):
        of_start = made.model_copy(update={"incarnations": incarnations})
        for engine in range(2):
            Path(world_file(of_start, engine)).touch()
    forget_worlds(str(tmp_path), 1)
    assert [file.name for file in tmp_path.iterdir()] == ["world-0-0"]
