"""What earlier runs have shown is what git has of them."""

import pytest

from experiments import run_history
from experiments.earlier_runs import COMMITS, published, renamed


@pytest.mark.parametrize("name", COMMITS)
def test_the_last_earlier_run_is_as_its_commit_has_it(name: str) -> None:
    assert published(name, COMMITS[name][-1]) == run_history.read()[name][-1]


def test_only_old_names_are_changed() -> None:
    old, new = '{"static-dp": 1, "pinned-dp": 2}', '{"stock-dp": 1, "static-dp": 2}'
    assert renamed(old) == renamed(new) == new
