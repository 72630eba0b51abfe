"""Numbers that follow from a text in every process."""

from __future__ import annotations

import hashlib


def text_digest(text: str, *, num_bits: int = 64) -> int:
    """The first bits (64 at most) of the text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - num_bits)
