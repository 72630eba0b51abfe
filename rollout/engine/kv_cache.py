"""The memory of keys and values: pages of positions, lent to sequences and counted.

Every layer has its own rows, all addressed by one slot number: slot = page * page_size + offset. Latent attention
keeps one latent a token whose leading part is the value: its values are a view of the keys, so nothing is stored
twice. The experts chosen for a token lie in the same slot, because whoever reuses a page must report its routes too.

Invariant: a page is free, or lent (count > 0), or kept without a user (count 0, by `PrefixCache`), and nothing else.

Shapes: S slots, G key-value heads, d head dim of keys, e of values, L layers with experts, K experts a token.
"""

from __future__ import annotations

import numpy as np
import torch

from model.config import ModelConfig
from model.kernels.attention.reference import Pages
from model.layers import TORCH_DTYPE
from model.transformer import route_dtype
from rollout.config import EngineConfig, KvDtype

_NARROW = {KvDtype.bf16: torch.bfloat16, KvDtype.int8: torch.int8, KvDtype.fp8: torch.float8_e4m3fn}
_NUMPY_ROUTES = {torch.uint8: np.uint8, torch.int16: np.int16}


class CacheError(ValueError):
    """What the cache cannot hold."""


class KvCache:
    """Pages for one model."""

    def __init__(self, model: ModelConfig, config: EngineConfig):
        """Count the pages that the settings allow; the memory itself comes with `allocate`.

        Raises:
            CacheError: The budget is too small for one sequence of the longest length.
        """
        self.page_size = config.page_size
        self._model = model
        self._dtype = _NARROW.get(config.kv_dtype, TORCH_DTYPE[model.compute_dtype])
        self._quantized = config.kv_dtype in (KvDtype.int8, KvDtype.fp8)
        latent = model.is_latent
        self._num_heads = 1 if latent else model.num_kv_heads
        self._key_dim = model.kv_lora_rank + model.qk_rope_head_dim if latent else model.head_dim
        self._value_dim = 0 if latent else model.head_dim
        self.pages_per_sequence = -(-config.max_seq_len // config.page_size)
        """Pages of a sequence of the longest length."""
        self.num_pages = config.max_batch_size * self.pages_per_sequence
        if config.memory_bytes:
            self.num_pages = min(self.num_pages, config.memory_bytes // self.page_bytes)
            if self.num_pages < self.pages_per_sequence:
                raise CacheError(
                    f"engine.memory_bytes: must hold one sequence of max_seq_len={config.max_seq_len}, which takes "
                    f"{self.pages_per_sequence * self.page_bytes}, got {config.memory_bytes}; raise it "
                    "(rollout.kv_memory_mb) or lower max_seq_len"
                )
        self._layers: list[tuple[Pages, Pages]] = []
        self.routes_SLK = np.empty((0, 0, 0), np.uint8)
        self.allocate()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, its routes included."""
        model = self._model
        tensors = 1 if not self._value_dim else 2
        values = self._num_heads * (self._key_dim + self._value_dim) * self._dtype.itemsize
        scales = self._num_heads * tensors * 4 if self._quantized else 0
        routes = len(model.moe_layers) * model.num_experts_per_tok * route_dtype(model).itemsize
        return self.page_size * ((values + scales) * model.num_layers + routes)

    @property
    def values_in_keys(self) -> bool:
        """Whether values are a view of the keys, so that only keys are written."""
        return not self._value_dim

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is there."""
        return bool(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        tensors = {pages.rows_SGd.untyped_storage().data_ptr(): pages for layer in self._layers for pages in layer}
        held = sum(pages.rows_SGd.untyped_storage().nbytes() for pages in tensors.values())
        scales = sum(0 if pages.scales_SG is None else pages.scales_SG.nbytes for pages in tensors.values())
        return held + scales + self.routes_SLK.nbytes

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def allocate(self) -> None:
        """Reserve the memory; every page is free."""
        model, num_slots = self._model, self.num_pages * self.page_size
        self._layers = [self._make_layer(num_slots) for _ in range(model.num_layers)]
        shape = (num_slots, len(model.moe_layers), model.num_experts_per_tok)
        self.routes_SLK = np.empty(shape, _NUMPY_ROUTES[route_dtype(model)])
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._counts = [0] * self.num_pages

    def drop(self) -> None:
        """Give the memory back. Nothing may be lent."""
        self._layers, self.routes_SLK, self._free, self._counts = [], self.routes_SLK[:0].copy(), [], []

    def layer(self, index: int) -> tuple[Pages, Pages]:
        """Keys and values of a layer."""
        return self._layers[index]

    def take(self) -> int:
        """A free page, lent once. The caller has checked `num_free`."""
        page = self._free.pop()
        self._counts[page] = 1
        return page

    def lend(self, page: int) -> None:
        """One more user of a page."""
        self._counts[page] += 1

    def unlend(self, page: int) -> bool:
        """One user fewer; whether none is left. Whoever returned it last frees it or keeps it."""
        self._counts[page] -= 1
        return self._counts[page] == 0

    def free(self, page: int) -> None:
        """A page without a user is nobody's again."""
        self._free.append(page)

    def _make_layer(self, num_slots: int) -> tuple[Pages, Pages]:
        """Uninitialised rows: what a slot holds is read only after it was written."""
        heads = self._num_heads
        keys = self._make_pages(num_slots, heads, self._key_dim)
        if self._value_dim:
            return keys, self._make_pages(num_slots, heads, self._value_dim)
        return keys, Pages(keys.rows_SGd[..., : self._model.kv_lora_rank], keys.scales_SG)

    def _make_pages(self, num_slots: int, heads: int, dim: int) -> Pages:
        scales = torch.empty(num_slots, heads) if self._quantized else None
        return Pages(torch.empty(num_slots, heads, dim, dtype=self._dtype), scales)
