"""ACTING: episodes, the sampler and the Ray workers that run them."""
