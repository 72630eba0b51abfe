"""From router logits to the choice of experts and their weights."""
