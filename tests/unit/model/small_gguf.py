"""Small GGUF files written by the `gguf` package, in the row order of llama.cpp's converter."""

import gguf
import numpy as np

from model.config import ModelConfig, RopeConfig
from model.llama import llama_shapes

CONFIG = ModelConfig(
    vocab_size=13,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(theta=5000.0),
    expert_hidden_size=96,
    num_experts=1,
    num_experts_per_tok=1,
    rms_norm_eps=1e-5,
    max_positions=256,
)
TOKENS = ["<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "Ġ", "Ġa", "ab", "12", "Ċ", "<", "|"]
MERGES = ["Ġ a", "a b", "1 2"]
STORED = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name):
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, middle = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{STORED[middle]}.weight"


def interleave(weight, num_heads):
    """What llama.cpp's converter does to query and key rows."""
    rows, dim = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, dim).swapaxes(1, 2).reshape(rows, dim)


def values():
    """The Hugging Face tensors: multiples of 1/64 that fp16 holds exactly."""
    generator = np.random.default_rng(0)
    return {
        name: generator.integers(-64, 64, shape).astype(np.float32) / 64 for name, shape in llama_shapes(CONFIG).items()
    }


def write(path, *, arch="llama", metadata=None, skip=(), quantized=(), extra=None):
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 16,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", (metadata or {}).get(key, value))
    for key, value in {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5000.0}.items():
        if key not in skip:
            writer.add_float32(f"llama.{key}", value)
    for key, value in (metadata or {}).items():
        if key not in numbers:
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if "smollm" in skip else "smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * 11)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(1)
    if "template" not in skip:
        writer.add_chat_template("{{ messages }}")
    for name, value in {**values(), **(extra or {})}.items():
        if name in skip:
            continue
        if ".q_proj" in name or ".k_proj" in name:
            value = interleave(value, 4 if ".q_proj" in name else 2)
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored_name(name), gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name if extra and name in extra else stored_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
