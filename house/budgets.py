"""The budgets of the product as a whole. A figure that misses its budget may only go down."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from house.features import features, files_of, names_of
from house.source import PRODUCT, Module, all_statements, modules, room_of
from house.walks import Record, load

TABLE = Path(__file__).with_name("budgets.toml")
SLACK = {"statements": 100}
"""By how much a present figure may be above the real one: a change of a few statements is none of
the table. Others are exact.
"""


@dataclass(frozen=True)
class Figure:
    """One figure: its value now, its budget, and the present figure of the table, if it has one.

    `kind`: statements, rooms or walk. `name`: of the feature or the walk.
    """

    kind: str
    name: str
    now: int
    budget: int
    present: int | None

    def problem(self) -> str | None:
        """Return what is wrong with it, in words."""
        what = f"{self.kind} of {self.name}: {self.now}"
        line = f"its line in {TABLE.name}"
        if self.present is None:
            return f"{what}, at most {self.budget}" if self.now > self.budget else None
        if self.now > self.present:
            return f"{what}, more than the present {self.present} (budget {self.budget})"
        if self.present <= self.budget or self.now <= self.budget:
            return f"{what}, within {self.budget}: take {line} away"
        if self.now < self.present - SLACK.get(self.kind, 0):
            return f"{what}: lower {line} from {self.present}"
        return None


def rooms_of_features(product: Iterable[Module]) -> dict[str, list[str]]:
    """Return the files that know each feature."""
    names = {module.path: names_of(module) for module in product}
    return {feature: files_of(words, names) for feature, words in features().items()}


def figures() -> list[Figure]:
    """Return all figures that have a budget."""
    product = modules(PRODUCT)
    total = sum(all_statements(module.tree) for module in product)
    rooms = {
        feature: len({room_of(path) for path in files})
        for feature, files in rooms_of_features(product).items()
    }
    return with_budgets(total, rooms, load(), tomllib.loads(TABLE.read_text(encoding="utf-8")))


def with_budgets(
    total: int, rooms: Mapping[str, int], walks: Mapping[str, Record], table: Mapping[str, Any]
) -> list[Figure]:
    """Return the figures beside their budgets. Raises ValueError for a line of the table that names
    no figure.
    """
    budget, present = table["budget"], table["present"]
    values = {
        "statements": {PRODUCT: total},
        "rooms": dict(rooms),
        "walk": {name: record.needed for name, record in walks.items()},
    }
    lines = {"statements": {PRODUCT: present["statements"]}} if "statements" in present else {}
    lines |= {kind: present.get(kind, {}) for kind in ("rooms", "walk")}
    for kind, named in lines.items():
        if unknown := set(named) - set(values[kind]):
            raise ValueError(f"{TABLE.name}: {kind} of {sorted(unknown)}: there is no such figure")
    return [
        Figure(kind, name, now, budget[kind], lines.get(kind, {}).get(name))
        for kind, of_kind in values.items()
        for name, now in of_kind.items()
    ]
