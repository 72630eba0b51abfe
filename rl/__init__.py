"""LEARNING: the round, the algorithms, the DeepSpeed learner, publishing and checkpoints."""
