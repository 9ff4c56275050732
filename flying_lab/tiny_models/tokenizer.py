"""The tokenizer of a tiny random model: one token for each byte, specials, and made-up words.

`zoo.cache` takes this module's code for a part of each checkpoint's identity: recorded answers are
of another model when it changes.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MAX_POSITIONS = 32768
BOS, EOS = 256, 257
SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] "
    "}}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: itself if it prints, and
    otherwise one from 256 on.
    """
    prints = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def _words(count: int) -> list[str]:
    """Return made-up words of two syllables for the tokens that no text encodes to, so that output
    reads as words.
    """
    syllables = [consonant + vowel for vowel in "aeiou" for consonant in "bcdfghjklmnprstvwz"]
    # U+0120 stands for a space
    words = [f"\u0120{first}{second}" for first in syllables for second in syllables]
    if count > len(words):
        raise ValueError(f"{count} words are more than {len(words)}")
    return [words[i * len(words) // count] for i in range(count)]


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a tokenizer in which byte b is token b, specials follow from 256 and words fill the
    rest.
    """
    letters = [*_byte_letters(), *SPECIALS]
    vocab = {letter: i for i, letter in enumerate([*letters, *_words(vocab_size - len(letters))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(special, special=True, normalized=False) for special in SPECIALS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    bos, eos, pad = SPECIALS[:3]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": pad,  # some classes add their own otherwise, with an id beyond the vocabulary
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(path / "tokenizer_config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
