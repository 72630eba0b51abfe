"""The inference engine: batched decoding on a KV cache."""
