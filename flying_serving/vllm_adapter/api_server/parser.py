"""vLLM's parser of flags, with a first screen of help of its own."""

from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser

from flying_serving.errors import ConfigError

_NONE_FOUND = "No group or arguments matching"
"""How vLLM's help begins for a word of `--help=WORD` that it does not find."""


class FlagParser(FlexibleArgumentParser):
    """vLLM's parser: `--help=all`, `--help=GROUP` and `--help=WORD` are its own.

    `screen`: the text of `--help`. The other arguments are those of vLLM's class.
    """

    def __init__(self, screen: str, **more: Any) -> None:
        super().__init__(**more)
        self._screen = screen

    def format_help(self) -> str:
        """Return what was asked for: the screen, all flags, those of a group, or those that have a
        word in their name.

        Raises:
            ConfigError: if no group and no flag has the word; with the groups that there are.
        """
        if self._search_keyword is None:
            return self._screen
        found = super().format_help()
        if found.startswith(_NONE_FOUND):
            raise ConfigError(
                f"--help={self._search_keyword}: must be all, a part of a flag's name, or one of "
                f"the groups {', '.join(self.groups())}"
            )
        return found

    def groups(self) -> list[str]:
        """Return the words for groups of flags that `--help=GROUP` takes."""
        titles = [group.title for group in self._action_groups if group._group_actions]
        return [title for title in titles if title and " " not in title]
