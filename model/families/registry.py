"""The families by name, and config.json in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import ConfigError, Family, ModelConfig
from model.families.base import FamilyFormat
from model.families.deepseek_v3 import DEEPSEEK_V3
from model.families.gpt_oss import GPT_OSS
from model.families.keys import check_held
from model.families.mixtral import MIXTRAL
from model.families.olmoe import OLMOE
from model.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[Family, FamilyFormat] = {
    format.family: format for format in (DEEPSEEK_V3, GPT_OSS, MIXTRAL, OLMOE, QWEN3_MOE)
}


def read_config(values: Mapping[str, Any]) -> tuple[FamilyFormat, ModelConfig]:
    """The family and configuration of a published config.json.

    Raises:
        ConfigError: An unknown family, or one line for each key that is not supported.
    """
    for format in FAMILIES.values():
        if values.get("model_type") in format.model_types or format.recognises(values):
            return format, format.read_config(values)
    known = sorted(name for format in FAMILIES.values() for name in format.model_types)
    raise ConfigError(
        f"config.json: model_type: must be one of {known}, got {values.get('model_type')}; "
        "a new family is one file in model/families/"
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of the configuration's family, as `transformers` reads it.

    Raises:
        ConfigError: One line for each field that the family cannot hold.
    """
    format = FAMILIES[config.family]
    values = format.write_config(config)
    check_held(config, format.read_config(values))
    return values
