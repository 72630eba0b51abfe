"""What a folder of adapters is for other programs: one merged model, or a PEFT adapter.

PEFT (0.21, `tuners/lora/layer.py`): a linear layer has `lora_A.weight` [r, in] and `lora_B.weight` [out, r]. A fused
parameter [E, ...] is a `target_parameter`, whose factors are two matrices for all experts, A [E r, in] with an expert's
rows together and B [out, r E] with the experts innermost; a module's second parameter wraps its first, so that
`experts.lora_A` is of `down_proj` and `experts.base_layer.lora_A` of `gate_up_proj`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from model.adapter_file import StoredAdapters, load_adapters, load_base
from model.config import Family, LoraTargets, ModelConfig
from model.loaded import Form, LoadedModel
from model.lora import adapted_name, merged, values
from model.safetensors_file import write_safetensors
from model.snapshot import published_view, view

PEFT = "peft"
_PREFIX = "base_model.model."


def merged_model(folder: Path) -> LoadedModel:
    """Base and adapters of a folder as one model with fp32 weights: `W + s B A` of what the policy computes with.

    Raises:
        CheckpointError: The adapters or their base cannot be read, or do not belong together.
    """
    stored = load_adapters(folder)
    base = load_base(folder, stored)
    weights = merged(values(base.packed()), values(published_view(stored.masters)), stored.lora)
    return LoadedModel(config=base.config, form=Form.MASTER, weights=weights, metadata={})


def save_peft(folder: Path, source: Path) -> None:
    """Write the adapters of `source` as PEFT's two files; their base is exported by itself.

    Raises:
        CheckpointError: As `merged_model`.
    """
    stored = load_adapters(source)
    config = load_base(source, stored).config
    entries = {name: tensor.contiguous() for name, tensor in _peft_entries(stored, config)}
    write_safetensors(folder / "adapter_model.safetensors", entries, {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_peft_config(stored), indent=2, sort_keys=True) + "\n")


def _peft_entries(stored: StoredAdapters, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and bf16 values, which are those that the policy computes with."""
    for name, packed in published_view(stored.masters).items():
        factor = view(packed, torch.bfloat16)
        of, letter = adapted_name(name), name[-1]
        if factor.ndim == 2:
            yield f"{_PREFIX}{of.removesuffix('.weight')}.lora_{letter}.weight", factor
            continue
        module, _, parameter = of.rpartition(".")
        path = f"{module}.base_layer" if parameter == "gate_up_proj" else module
        if letter == "A":
            factor = factor.flatten(0, 1)
        else:
            if parameter == "gate_up_proj" and config.family is Family.gpt_oss:  # its gate and up rows alternate
                factor = torch.stack(factor.chunk(2, dim=1), dim=2).flatten(1, 2)
            factor = factor.permute(1, 2, 0).flatten(1)
        yield f"{_PREFIX}{path}.lora_{letter}.weight", factor


def _peft_config(stored: StoredAdapters) -> dict[str, object]:
    adapted = {adapted_name(name) for name in stored.masters}
    modules = {name.split(".")[-2] for name in adapted if name.endswith(".weight")}
    with_experts = stored.lora.targets is not LoraTargets.attention
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": stored.lora.rank,
        "lora_alpha": stored.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": sorted(modules),
        "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"] if with_experts else None,
    }
