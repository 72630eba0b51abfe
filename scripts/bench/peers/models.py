"""The random models that engines are compared on: the same bytes for every engine, in the form that each one reads.

    python scripts/bench/peers/models.py [tiny 252m gpt-oss-706m] [--folder runs/peers]

    NAME/mxfp4/                 experts in MXFP4, the rest bf16, as `model.export` writes it: our engine; gpt-oss: vLLM
    NAME/mxfp4_vllm/            the same bytes under names with which vLLM's CPU build reads them: Qwen3-MoE only
    NAME/bf16/                  the same values decoded: transformers, vLLM
    NAME/{f32,bf16,mxfp4}.gguf  the same values again: llama.cpp
    NAME/{q8_0,mxfp4_q8_0}.gguf rounded further: 8 bits where the name says so; llama.cpp alone

Published bytes come first and everything else is decoded from them, so all but the last line compute one function. An
existing folder is left as it is. Weights are drawn so that no layer is idle: routers separate the experts, and a layer
adds a fifth of the residual stream.

    name           parameters   layers  hidden  heads/kv  head  experts  chosen  width  vocabulary
    tiny             9,186,048       4     256       4/2    64        8       2    256        4096
    252m           251,826,432      12     768      12/4    64       16       4    512        4096
    gpt-oss-706m   705,867,024      12     768      12/4    64       32       4    768        4096
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from write_gguf import GGUF_MODES, write_gguf

from model.checkpoint import appearing_whole
from model.config import Activation, Family, ModelConfig, QkNorm, RopeConfig, RopeScaling
from model.export import export
from model.hf.writer import HfFormat, save_hf
from model.loaded import Weight
from model.size import ModelSize
from model.snapshot import publish_tensor
from model.transformer import parameter_shapes

ROOT = Path(__file__).parents[3]
BRANCH_STD = 0.2
"""What a layer adds to the residual stream, relative to the embedding."""

MODELS = {
    "tiny": ModelConfig(
        family=Family.qwen3_moe,
        vocab_size=4096,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=QkNorm.head,
        rope=RopeConfig(theta=1e6),
        expert_hidden_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        tie_embeddings=False,
        max_positions=4096,
    ),
    "252m": ModelConfig(
        family=Family.qwen3_moe,
        vocab_size=4096,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        qk_norm=QkNorm.head,
        rope=RopeConfig(theta=1e6),
        expert_hidden_size=512,
        num_experts=16,
        num_experts_per_tok=4,
        tie_embeddings=False,
        max_positions=4096,
    ),
    # A stretch of 1 leaves YaRN's rotation plain: vLLM insists on YaRN, and the engines round its border differently.
    "gpt-oss-706m": ModelConfig(
        family=Family.gpt_oss,
        vocab_size=4096,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        attention_bias=True,
        attention_sinks=True,
        sliding_window=128,
        window_layers=[*range(0, 12, 2)],
        rope=RopeConfig(theta=150000.0, scaling=RopeScaling.yarn, factor=1.0, original_positions=4096, truncate=False),
        expert_hidden_size=768,
        num_experts=32,
        num_experts_per_tok=4,
        expert_bias=True,
        expert_activation=Activation.clamped_swiglu,
        router_bias=True,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=4096,
    ),
}


def draw(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The fp32 master of one parameter; its stream is its own, keyed by its name."""
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    value = torch.empty(shape)
    if name.endswith("norm.weight"):
        return value.uniform_(0.5, 1.5, generator=generator)
    if name.endswith(("bias", "sinks")):
        return value.normal_(0.0, 0.1, generator=generator)
    if "embed_tokens" in name:
        return value.normal_(0.0, 1.0, generator=generator)
    scale = BRANCH_STD if "o_proj" in name or "down_proj" in name else 2.0 if "lm_head" in name else 1.0
    return value.normal_(0.0, scale * shape[-1] ** -0.5, generator=generator)


def _published(config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    for name, shape in parameter_shapes(config).items():
        yield name, publish_tensor(name, draw(name, shape))


def _write_for_vllm(published: Path, folder: Path) -> None:
    """VLLM 0.32 reads compressed-tensors MXFP4 with CUDA kernels only; plain `mxfp4` experts it also reads on a CPU."""
    entries = load_file(published / "model.safetensors")
    renamed = {name.replace(".weight_packed", ".weight"): tensor for name, tensor in entries.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make(name: str, folder: Path) -> None:
    """Write every form of a model that is not there yet."""
    config, folder = MODELS[name], folder / name
    config.validate()
    published, decoded = folder / "mxfp4", folder / "bf16"
    if not published.exists():
        with appearing_whole(published) as partial:
            save_hf(partial, config, _published(config), HfFormat.MXFP4)
    if config.family is Family.qwen3_moe and not (folder / "mxfp4_vllm").exists():
        with appearing_whole(folder / "mxfp4_vllm") as partial:
            _write_for_vllm(published, partial)
    if not decoded.exists():
        export(str(published), decoded, HfFormat.BF16)
    for mode in GGUF_MODES:
        path = folder / f"{mode}.gguf"
        if not path.exists():
            write_gguf(published, path, mode)
    print(f"{name}: {ModelSize.of(config).num_total:,} parameters in {folder}", flush=True)


def main() -> int:
    """Make the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*MODELS], help=f"of {[*MODELS]}")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "peers")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - MODELS.keys()):
        parser.error(f"names: must be of {[*MODELS]}, got {unknown}; add a shape to MODELS")
    for name in arguments.names:
        make(name, arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
