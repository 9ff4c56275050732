"""What the check says of the machine and the versions."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
from vllm.version import __version__ as vllm_version

SMI = "nvidia-smi"
UNKNOWN = "unknown"


def facts(*, has_gpu: bool) -> dict[str, str]:
    """Return them by name. A program that is not there leaves a fact unknown."""
    return {
        "Date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "Device": torch.cuda.get_device_name() if has_gpu else "none, a dry run on the CPU",
        "Driver": said_by([SMI, "--query-gpu=driver_version", "--format=csv,noheader"])
        if has_gpu
        else "none",
        "Software": f"torch {torch.__version__}, Python {sys.version.split()[0]}, "
        f"vLLM {vllm_version}",
        "Code": f"commit {said_by(['git', 'describe', '--always', '--dirty', '--exclude=*'])}",
    }


def said_by(command: Sequence[str]) -> str:
    """Return the first line that a command prints, or UNKNOWN."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return next(iter(done.stdout.splitlines()), UNKNOWN)


def unusable_gpu(*, has_gpu: bool) -> str | None:
    """Return why a GPU that is there cannot be checked; None if it can, or if there is none."""
    if has_gpu or shutil.which(SMI) is None:
        return None
    return (
        f"{SMI} is there, and this interpreter's torch {torch.__version__} sees no CUDA: run the "
        "check from an environment with CUDA's torch and vLLM, or with --dry"
    )
