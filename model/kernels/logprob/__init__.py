"""Logprobs of given tokens under a temperature, and entropies."""
