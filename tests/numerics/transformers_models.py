"""Random mini models of every family, made and written by `transformers`: what network and loader must equal."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from model.config import Family

EMBEDDING_STD, TIED_EMBEDDING_STD = 1.0, 0.04
"""Where the table also makes the logits it must be smaller: they are of the size sqrt(D) times it."""

BRANCH_STD = 0.2
"""What a layer adds to the residual stream, relative to the embedding: as after training, none outshouts the others."""

WINDOW = 9
ORIGINAL_POSITIONS = 64
"""Sequences of the tests cross both: the border of a window and that of YaRN's original context."""

_YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": ORIGINAL_POSITIONS}


def mini(family: Family, seed: int) -> nn.Module:
    """A model of a random shape, sizes odd multiples of 32 among them, with one expert that no token ever chooses.

    Weights, biases, sinks and norms are all drawn: at transformers' own initialisation several features do nothing.
    """
    config = _config(family, random.Random(f"{family}/{seed}"))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        embedding_std = TIED_EMBEDDING_STD if config.tie_word_embeddings else EMBEDDING_STD
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if "embed_tokens" in name:
                tensor.normal_(0.0, embedding_std)
            elif tensor.ndim == 1:
                is_norm = "norm" in name
                tensor.uniform_(0.5, 1.5) if is_norm else tensor.normal_(0.0, 0.3)
            else:
                in_axis = 1 if family is Family.gpt_oss and "experts" in name and tensor.ndim == 3 else -1
                is_branch_end = "o_proj" in name or "down_proj" in name
                scale = BRANCH_STD * embedding_std if is_branch_end else 1.0
                tensor.normal_(0.0, scale * tensor.shape[in_axis] ** -0.5)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _starve_expert_0(name, tensor)
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.bfloat16())  # what a checkpoint in bf16 holds
    return model.requires_grad_(False)


def write(model: nn.Module, folder: Path, **arguments: Any) -> Path:
    """As a checkpoint in bf16, as transformers writes it; a copy, because bf16 would round the rotary table too."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder, **arguments)
    return folder


def logits(model: nn.Module, ids_T: torch.Tensor) -> torch.Tensor:
    """[T, V] of one sequence, in the model's dtype."""
    with torch.no_grad():
        return model(ids_T[None]).logits[0]


def _starve_expert_0(name: str, tensor: torch.Tensor) -> None:
    """Expert 0 always scores 0 and the others in pairs of opposite signs, so three of the other six score higher."""
    if name.endswith("e_score_correction_bias"):
        tensor[0] = -10.0
    elif name.endswith(("mlp.gate.weight", "mlp.router.weight")) and tensor.ndim == 2:
        tensor[0] = 0.0
        half = (len(tensor) - 1) // 2
        tensor[1 + half : 1 + 2 * half] = -tensor[1 : 1 + half]
    elif name.endswith("mlp.router.bias"):
        tensor[0] = -30.0


def _config(family: Family, draw: random.Random) -> transformers.PreTrainedConfig:
    heads = draw.choice([2, 4])
    common = {
        "vocab_size": draw.choice([97, 160, 211]),
        "hidden_size": draw.choice([96, 160, 224]),
        "num_hidden_layers": draw.choice([2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, 2]),
        "max_position_embeddings": 512,
        "tie_word_embeddings": draw.random() < 0.3,
        "num_experts_per_tok": draw.choice([1, 2, 3]),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    head_dim, width = draw.choice([8, 16, 24]), draw.choice([32, 96, 160])
    theta = draw.choice([1e4, 1e6])
    plain = {"rope_type": "default", "rope_theta": theta}
    match family:
        case Family.mixtral:
            rope = draw.choice([plain, {"rope_type": "linear", "rope_theta": theta, "factor": 4.0}])
            return transformers.MixtralConfig(
                **common, head_dim=head_dim, intermediate_size=width, num_local_experts=7, rope_parameters=rope,
                sliding_window=draw.choice([None, WINDOW]),
            )  # fmt: skip
        case Family.olmoe:
            return transformers.OlmoeConfig(
                **common, intermediate_size=width, num_experts=7, rope_parameters=plain,
                norm_topk_prob=draw.random() < 0.5,
            )  # fmt: skip
        case Family.qwen3_moe:
            return transformers.Qwen3MoeConfig(
                **common, head_dim=head_dim, moe_intermediate_size=width, intermediate_size=96, num_experts=7,
                norm_topk_prob=draw.random() < 0.7, mlp_only_layers=draw.choice([[], [1]]), rope_parameters=plain,
                attention_bias=draw.random() < 0.3,
            )  # fmt: skip
        case Family.gpt_oss:
            yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": False, **_YARN}
            return transformers.GptOssConfig(
                **common, head_dim=head_dim, intermediate_size=width, num_local_experts=7, sliding_window=WINDOW,
                rope_parameters=yarn, swiglu_limit=draw.choice([1.0, 7.0]),
            )  # fmt: skip
        case Family.deepseek_v3:
            groups = draw.choice([1, 4])
            mscales = {"mscale": 1.0, "mscale_all_dim": draw.choice([0.7, 1.0])}
            return transformers.DeepseekV3Config(
                **{**common, "num_key_value_heads": heads}, moe_intermediate_size=width, intermediate_size=96,
                n_routed_experts=8, n_shared_experts=draw.choice([1, 2]), n_group=groups, topk_group=min(2, groups),
                kv_lora_rank=draw.choice([20, 32]), q_lora_rank=draw.choice([None, 24]), qk_rope_head_dim=8,
                qk_nope_head_dim=16, v_head_dim=draw.choice([12, 24]), first_k_dense_replace=1, num_mtp_layers=0,
                routed_scaling_factor=2.5, norm_topk_prob=draw.random() < 0.7, rope_interleave=draw.random() < 0.7,
                rope_parameters=draw.choice([plain, {**plain, **_YARN, **mscales, "rope_type": "yarn"}]),
            )  # fmt: skip
