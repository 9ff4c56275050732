"""The size of the house: statements, the rooms of each feature, four recorded walks, the biggest
classes, and the budgets of all of it.

- `source.py`: the source tree as data. `features.py`, `features.toml`: which files know a feature.
- `walks.py`, `walks.json`: the files that each walk enters, as they were recorded.
- `entered.py`, `windows.py`, `recording.py`: how a walk is recorded on live servers.
- `budgets.py`, `budgets.toml`: budgets, and the figures that miss theirs.
- `report.py`: `make house`.
"""
