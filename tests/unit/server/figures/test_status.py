"""What `/flying/status` says of the costs of steps."""

from dataclasses import replace

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.controller.controller import Controller
from flying_serving.parallelism import Parallelism
from flying_serving.server.figures.status import describe
from tests.unit.controller.model_settings import settings
from tests.unit.policy.costs import costs, measured

DEPLOYMENT = Deployment(
    run_dir="", engines=4, devices=1, group_sizes=(1, 2, 4), flying=FlyingConfig()
)


def test_steps_have_costs_for_each_way_that_was_measured() -> None:
    controller = Controller(settings("manual"))
    steps = measured(costs((1, 2, 4)))
    divided = [
        replace(step, parallelism=Parallelism.TOKEN)
        for step in steps
        if step.size == 4 and step.prefill_tokens + step.sequences >= 64
    ]
    controller.state.steps.calibrate([*steps, *divided])
    found = describe(controller, DEPLOYMENT)
    assert found["step_cost"].keys() == {"1", "2", "4"}
    assert found["token_parallel_step_cost"].keys() == {"4"}
    of_four = found["token_parallel_step_cost"]["4"]
    assert of_four["cost"].keys() == found["step_cost"]["4"].keys()
    assert (of_four["size"], of_four["least_tokens"]) == (4, 64)
