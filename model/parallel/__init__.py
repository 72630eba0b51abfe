"""A model on several ranks: who holds what, and how rows travel between them. Knows `torch.distributed` alone."""
