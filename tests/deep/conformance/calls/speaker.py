"""A tiny model that can say what a test wants: its tokenizer has the tags of reasoning and tools.

A request forces its tokens (`harness.force`). So a random model reasons and calls tools, in
every layout with the same words.
"""

import json
from pathlib import Path
from typing import Any

from tests.stock.requests import tokens

NAME = "a-tiny-speaker"
EOS = 257
WORDS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
FIRST_WORD = 300
"""The tokens from here on are made-up words, which no text encodes to."""
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% if not (continue_final_message and loop.last) %}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def write_speaker(plain: Path, folder: Path) -> Path:
    """Write the model `plain` to `folder` with tags in place of made-up words."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in plain.iterdir():
        if not path.name.startswith("tokenizer"):
            (folder / path.name).symlink_to(path.resolve())

    tokenizer = json.loads((plain / "tokenizer.json").read_text(encoding="utf-8"))
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    for number, word in enumerate(WORDS, FIRST_WORD):
        words[number] = word
        tokenizer["added_tokens"].append(_added(number, word))
    tokenizer["model"]["vocab"] = {word: number for number, word in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")

    config = json.loads((plain / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


def _added(number: int, word: str) -> dict[str, Any]:
    sides = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": word, **sides}


def says(text: str, *, ends: bool = True) -> dict[str, Any]:
    """Fields of a request whose answer begins with `text`, and ends with it unless told not to."""
    forced: list[int] = []
    while text:
        tag = next((word for word in WORDS if text.startswith(word)), None)
        forced += [FIRST_WORD + WORDS.index(tag)] if tag else list(text[0].encode())
        text = text[len(tag or text[0]) :]
    return {"vllm_xargs": {"force_token_ids": [*forced, *([EOS] if ends else [])]}}


def prompt(seed: int, count: int) -> list[int]:
    """A prompt of tokens that are printable text."""
    return [32 + token % 95 for token in tokens(seed, count)]
