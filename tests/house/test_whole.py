"""Budgets of the product as a whole: statements, rooms of a feature, files of a walk."""

import pytest

from house.budgets import Figure, figures
from house.features import features, knows, names_of
from house.source import PRODUCT, functions, modules
from house.walks import WALKS, Walk, load

FIGURES = figures()
WORDS = [(feature, word) for feature, words in features().items() for word in words]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.kind}: {figure.name}")
def test_figure_is_within_its_budget_or_goes_down(figure: Figure) -> None:
    assert figure.problem() is None


@pytest.fixture(scope="module")
def names() -> list[str]:
    return [names_of(module) for module in modules(PRODUCT)]


@pytest.mark.parametrize(("feature", "word"), WORDS)
def test_word_of_a_feature_is_in_use(names: list[str], feature: str, word: str) -> None:
    assert any(knows(text, word) for text in names), f"{feature}: {word}"


def test_every_walk_is_recorded() -> None:
    assert set(load()) == {walk.name for walk in WALKS}


@pytest.fixture(scope="module")
def there() -> set[tuple[str, str]]:
    return {
        (module.path.removeprefix(f"{PRODUCT}/"), name)
        for module in modules(PRODUCT)
        for name in functions(module)
    }


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.name)
def test_functions_of_a_recorded_walk_are_there(there: set[tuple[str, str]], walk: Walk) -> None:
    """Otherwise it counts code that is gone: `make house ARGS=--record` records it again."""
    kept = {(file.path, name) for file in load()[walk.name].files for name in file.functions}
    assert kept - there == set()
