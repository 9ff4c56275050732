"""The choice of the layout: policies over a snapshot. Pure."""
