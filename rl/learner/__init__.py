"""The learner: a plain class, its DeepSpeed engine, and the Ray shell around it."""
