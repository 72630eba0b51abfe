"""RMSNorm of heads and rotary position embedding, in one pass."""
