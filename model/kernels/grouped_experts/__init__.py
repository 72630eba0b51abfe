"""The expert MLPs of one MoE layer, applied to the tokens routed to each."""
