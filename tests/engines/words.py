"""A tokenizer for the tiny model: a token for every byte, some of two bytes and more, and special ones; eos is the tiny model's."""

from __future__ import annotations

import json
from pathlib import Path

import tiny

FIRST_BYTE = 8
"""The ids below it are special tokens; one of them ends an answer."""

LETTERS = ["na", "me", "name", "tr", "ue", "true", "fa", "ls", "fals", "false", "re", "red"]
PAIRS = ['{"', '":', '": ', ", ", ', "', '"}', *LETTERS]
"""Tokens of more than one byte, each from two that stand before it or are bytes."""


def _symbols() -> list[str]:
    """How byte-level BPE shows each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(0x100 + hidden.index(byte)) for byte in range(256)]


def _shown(text: str) -> str:
    symbols = _symbols()
    return "".join(symbols[byte] for byte in text.encode())


def build(folder: Path) -> Path:
    """Writes `tokenizer.json` into a folder."""
    vocabulary = {symbol: FIRST_BYTE + byte for byte, symbol in enumerate(_symbols())}
    merges: list[list[str]] = []
    for pair in PAIRS:
        shown = _shown(pair)
        cut = next(at for at in range(len(shown) - 1, 0, -1) if shown[:at] in vocabulary and shown[at:] in vocabulary)
        merges.append([shown[:cut], shown[cut:]])
        vocabulary[shown] = len(vocabulary) + FIRST_BYTE
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [{"id": id, "content": f"<|{id}|>", "special": True, **flags} for id in range(FIRST_BYTE)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def text(ids: list[int]) -> str:
    """The text of an answer, without special tokens. Raises `UnicodeDecodeError` where it is none."""
    words = {FIRST_BYTE + byte: bytes([byte]) for byte in range(256)}
    words |= {FIRST_BYTE + 256 + at: pair.encode() for at, pair in enumerate(PAIRS)}
    return b"".join(words[id] for id in ids if id >= FIRST_BYTE).decode()


assert FIRST_BYTE + 256 + len(PAIRS) <= tiny.VOCAB
assert tiny.EOS < FIRST_BYTE
