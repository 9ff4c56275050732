"""The command line of a server on emulated devices."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flying_lab.emulation import MODULE
from flying_lab.emulation.async_scheduling import keep_async_scheduling
from flying_lab.emulation.profile import KEY, Profile
from flying_lab.emulation.stand_in import BLOCK_TOKENS, kv_bytes, write_stand_in
from flying_lab.sim import models
from flying_lab.sim.hardware import parse_devices
from flying_lab.sim.machine import Modelled
from flying_lab.sim.system import check_engine

_WORKER = "flying_lab.emulation.worker.EmulatedWorker"
_LANE_WORKER = "flying_lab.emulation.worker.EmulatedLaneWorker"


def server_flags(profile: Profile, folder: Path, *, stock: bool) -> list[str]:
    """Write the stand-in model into `folder`. Returns the model's path and flags of `vllm serve`.

    The path comes first. `stock`: for vLLM's own server; otherwise
    for `flying-serving serve`.
    """
    return [
        str(write_stand_in(profile, folder)),
        f"--worker-cls={_WORKER if stock else _LANE_WORKER}",
        f"--additional-config={json.dumps({KEY: profile.model_dump()})}",
        f"--data-parallel-size={profile.engines}",
        f"--block-size={BLOCK_TOKENS}",
        f"--kv-cache-memory-bytes={kv_bytes(profile)}",
        f"--served-model-name={profile.model}",
        "--dtype=float32",
        "--enforce-eager",
    ]


def profile(settings: Mapping[str, Any]) -> Profile:
    """Return the profile of a command's settings, whose `devices_per_engine` may be None.

    Raises:
        ConfigError: for devices or a model that are not known, or an engine that cannot hold it.
    """
    machine = Modelled(models.load(settings["model"]), parse_devices(settings["hardware"]))
    devices = settings["devices_per_engine"] or machine.smallest_engine
    check_engine(machine, devices)
    return Profile.model_validate({**settings, "devices_per_engine": devices})


def run(settings: Mapping[str, Any], folder: Path, stock: bool, more: Sequence[str]) -> None:
    """Run a server until it ends, with further flags. A stock one takes this process's place."""
    flags = [*server_flags(profile(settings), folder, stock=stock), *more]
    if stock:
        os.environ["VLLM_PLUGINS"] = ""
        path, *others = flags
        os.execv(sys.executable, [sys.executable, "-m", MODULE, "--model", path, *others])
    from flying_serving.cli import serve

    keep_async_scheduling()
    serve.main(flags)
