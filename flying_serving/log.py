"""The one logger: below vLLM's, so that its handlers, format and level hold for it too."""

import logging

logger = logging.getLogger("vllm.flying_serving")
