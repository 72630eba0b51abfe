"""Policy-gradient algorithms: pure tensor maths, one file an algorithm."""
