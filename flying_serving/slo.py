"""Service level objectives: the limits that a request has to keep to count as good."""

import math

from pydantic import BaseModel, ConfigDict, Field

from flying_serving.errors import ConfigError


class Slo(BaseModel):
    """Limits in ms, inclusive, as `vllm bench serve --goodput`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft: float | None = Field(default=None, ge=0)
    tpot: float | None = Field(default=None, ge=0)
    e2el: float | None = Field(default=None, ge=0)

    @property
    def targets_s(self) -> tuple[float, float]:
        """Seconds of TTFT and TPOT that a policy aims at; infinite where there is no limit."""
        ttft_ms, tpot_ms = (
            math.inf if limit is None else limit for limit in (self.ttft, self.tpot)
        )
        return ttft_ms / 1e3, tpot_ms / 1e3


def parse_slo(text: str) -> Slo:
    """Parse an SLO from `ttft:2000,tpot:100,e2el:30000`, any of them.

    Raises:
        ConfigError: naming the part that is none of this.
    """
    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = float("nan")
        if name not in Slo.model_fields or name in limits or not limit >= 0:
            raise ConfigError(
                f"--slo={part!r}: ttft, tpot or e2el, each once, with a limit in ms, like ttft:2000"
            )
        limits[name] = limit
    if not limits:
        raise ConfigError(f"--slo={text!r}: at least one limit in ms, like ttft:2000,tpot:100")
    return Slo(**limits)
