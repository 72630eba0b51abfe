"""Published checkpoints on disk: how tensors are encoded, which files hold them, reading and writing folders."""
