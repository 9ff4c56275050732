"""Files in which groups share memory: which are an engine's whose start has failed."""

from pathlib import Path

from flying_serving.comm.group_files import forget_groups, group_file

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
