"""The gate of a dense feed-forward layer."""
