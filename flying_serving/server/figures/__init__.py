"""Figures of the API server, as plain data. Where a figure lives:

- its name, meaning and labels: `observe/metrics/table.py`, and of the live view: `observe/view/`
- figures that an engine reports (`EngineFigures`): asked for by `calls/engine_figures.py`
- figures that are counted here: `switches.py`, `predictions.py`, `losses.py`
- a page of `/metrics`: `page.py`, made at each scrape by `server/metrics.py`
- `GET /flying/status`: `status.py`; `GET /flying/view`: `state.py`; the trace of switches:
  `spans.py`
- what answers say of single engines, as text: `notes.py`
"""
