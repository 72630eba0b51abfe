"""The model of a run that starts from a checkpoint is the checkpoint's: its config.json stands for `model.*`.

Ours (`model/checkpoint.py`) and published ones (`model/families/`) alike. Imports nothing heavy, so that a checkpoint
that cannot be used is found before anything slow starts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tokenizers import Tokenizer

from model.config import ConfigError, ModelConfig
from model.families.registry import read_config
from rl.config import RunConfig
from rollout.renderers.registry import make_renderer
from rollout.tokenizer import TOKENIZER_FILE, load_tokenizer

CONFIG_FILE = "config.json"

_OWN = {"compute_dtype"}
"""What a run decides and a checkpoint does not."""


def adopt_checkpoint(config: RunConfig) -> None:
    """Put the model of `warm_start.checkpoint`, if there is one, into `config.model`.

    A value that equals the default of `ModelConfig` counts as not given; one that is given must be the checkpoint's.

    Raises:
        ConfigError: The folder has no readable config.json, or a given value is another one.
    """
    location = config.warm_start.checkpoint
    if location is None:
        return
    stored, usual = _stored(location), ModelConfig()
    for field in dataclasses.fields(ModelConfig):
        given, found = getattr(config.model, field.name), getattr(stored, field.name)
        if field.name not in _OWN and given not in (found, getattr(usual, field.name)):
            raise ConfigError(
                f"model.{field.name}: the checkpoint {location} has {found}, got {given}; leave it out, "
                "or start from another checkpoint"
            )
    config.model = dataclasses.replace(stored, **{name: getattr(config.model, name) for name in _OWN})


def check_chat(config: RunConfig) -> None:
    """Check that the checkpoint's tokenizer belongs to its model and has the tokens of the chat format.

    Raises:
        TokenizerError, RendererError: There is no such tokenizer, or it lacks a token.
        ConfigError: It has more entries than the model.
    """
    if config.warm_start.checkpoint is None:
        return
    tokenizer = load_tokenizer(Path(config.warm_start.checkpoint) / TOKENIZER_FILE)
    with_vocabulary(config.model, tokenizer)
    make_renderer(config.rollout.chat_format, tokenizer)


def with_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model with the tokenizer's vocabulary where its own is left open; it may be padded beyond the tokenizer's.

    Raises:
        ConfigError: The tokenizer has more entries than the model.
    """
    num_entries = tokenizer.get_vocab_size()
    if model.vocab_size and num_entries > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: must hold the tokenizer's {num_entries} entries, got {model.vocab_size}; "
            "take the tokenizer that belongs to the checkpoint"
        )
    return dataclasses.replace(model, vocab_size=model.vocab_size or num_entries)


def _stored(location: str) -> ModelConfig:
    if "://" in location:
        raise ConfigError(
            f"warm_start.checkpoint: must be a folder of this machine, got {location}; copy it with "
            f"python -m model.export {location} <folder> --format native"
        )
    folder = Path(location)
    if not folder.is_dir():
        raise ConfigError(
            f"warm_start.checkpoint: no such folder, got {location}; name the folder of a saved model (make "
            "model-smollm2 writes one), or leave it out to train the warm start"
        )
    path = folder / CONFIG_FILE
    try:
        values = dict(json.loads(path.read_text()))
        return ModelConfig.from_dict(values) if ModelConfig.is_own(values) else read_config(values)[1]
    except OSError as error:
        raise ConfigError(
            f"warm_start.checkpoint: no readable {CONFIG_FILE}, got {path} ({error.strerror}); name a folder that "
            "holds a model"
        ) from error
    except (TypeError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise ConfigError(f"warm_start.checkpoint: {path} cannot be used: {line}") from error
