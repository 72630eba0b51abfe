"""The tokenizer of a checkpoint: any `tokenizer.json`, or a byte-level BPE trained on an experiment's own corpus.

In the trained one every byte is a token, so any text can be read and emitted; digits are split. Whether a tokenizer has
the control tokens of a chat format, the format's renderer checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENIZER_FILE = "tokenizer.json"
"""Its name in a model folder."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be trained, or a file that is none."""


class Control(StrEnum):
    """Control tokens of a trained tokenizer, in the order of their ids (0, 1, ...)."""

    BOS = "<bos>"
    SYSTEM = "<system>"
    USER = "<user>"
    ASSISTANT = "<assistant>"
    TOOL = "<tool>"
    END = "<end>"


CALL = "<call>"
"""The control token before each tool call; only the tokenizers of tasks with tools have it."""

_NUM_BYTES = 256


def train_tokenizer(corpus: Iterable[str], vocab_size: int, *, calls: bool = False) -> Tokenizer:
    """A tokenizer of at most `vocab_size` entries (all 256 bytes and the control tokens included).

    With `calls` it can spell tool calls: `CALL` is its last control token.
    """
    controls = [*map(str, Control), *([CALL] if calls else [])]
    if vocab_size < _NUM_BYTES + len(controls):
        raise TokenizerError(
            f"warm_start.tokenizer_vocab_size: must hold {_NUM_BYTES} bytes and {len(controls)} control tokens, "
            f"got {vocab_size}; use at least {_NUM_BYTES + len(controls)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=controls,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return _plain(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer saved at `path` (`tokenizer.json`)."""
    if not path.is_file():
        raise TokenizerError(f"tokenizer: no file, got {path}; point to a checkpoint folder that holds one")
    return _parsed(path.read_text(errors="replace"), f"the tokenizer file {path}")


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer in its serialized form, as it travels to the rollout workers."""
    return _parsed(text, "the serialized tokenizer")


def _parsed(text: str, what: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 (the library raises nothing more special)
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{what}: is not a tokenizer, got <{reason}>; take the checkpoint's, or train one with rl.sft"
        ) from None
    return _plain(tokenizer)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True  # text that spells a control token is plain text
    return tokenizer
