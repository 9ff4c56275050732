"""Entry point `vllm.general_plugins`: vLLM calls it in every process that it starts."""

from flying_serving.config import KEY
from flying_serving.errors import HookError
from flying_serving.log import logger
from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter.patches import installer, table, version


def register() -> None:
    """Make `vllm serve --additional-config '{"flying_serving": {}}'` work. Without that key vLLM
    stays as it is.

    Under any vLLM but the one that the hooks were written for, that key is refused.
    """
    if version.installed_vllm() == version.VLLM_VERSION:
        installer.install(table.ENTRY_PATCHES, HOOKS)
        return
    try:
        installer.apply((table.REFUSAL,))
    except HookError as error:
        logger.warning("--additional-config %s would be ignored: %s", KEY, error)
