"""Calls of engine utilities: orders to engines, and the answers of engines.

- `engine_calls.py`: calls to one engine or to all, which fail when an engine is lost or too late.
- `layout_orders.py`: switches, for the controller and for operators.
- `weight_orders.py`: orders to lend weights, or to fetch them back.
- `adapters.py`: adapters (LoRA) that are loaded on every engine, or on none.
- `engine_figures.py`: figures that engines give when they are asked.
"""
