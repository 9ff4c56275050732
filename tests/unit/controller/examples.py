"""Requests and layouts of a server of two engines whose layout an operator chooses."""

from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell

NARROW, WIDE = Layout.uniform(2, 1), Layout.uniform(2, 2)
SHORT = RequestSpec(10, 30, 20)
OPEN_ENDED = RequestSpec(40, 41, 400)
HURRIED = RequestSpec(10, 30, 20, deadline_s=1.0)


def manual(capped: bool = False) -> ModelShell:
    """Return a server of two engines whose layout an operator chooses."""
    return ModelShell(settings("manual", 2, capped=capped))
