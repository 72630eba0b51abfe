"""JUDGING: rewards are pure functions of (Task, Trajectory, Evidence)."""
