"""Costs of steps, arrivals, and forecasts from both. Pure."""
