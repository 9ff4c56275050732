"""Figures of three servers for the demo's tests."""

from __future__ import annotations

from collections.abc import Mapping

from flying_lab.demo.phases import AUTO, FIGURES, FIXED, PhaseFigures

SERVERS = (*FIXED, AUTO)


def phase(name: str, means_ms: tuple[float, float, float]) -> PhaseFigures:
    """Return a phase in which all figures of a server are its mean E2E: apart, together, auto."""
    by_server: Mapping[str, Mapping[str, float]] = {
        server: dict.fromkeys(FIGURES, mean_ms)
        for server, mean_ms in zip(SERVERS, means_ms, strict=True)
    }
    return PhaseFigures(name, 20, by_server)


QUIET = phase("quiet", (1400.0, 1000.0, 1100.0))
BURST = phase("burst", (4000.0, 5600.0, 4400.0))
AFTER = phase("after", (1200.0, 800.0, 760.0))
PHASES = (QUIET, BURST, AFTER)
