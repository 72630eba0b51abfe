"""A reward that an untrained policy already varies in, so that short runs have something to train on."""


def answer_length(task, trajectory, evidence):
    return trajectory.num_sampled_tokens / 100


def every_third_length(task, trajectory, evidence):
    """1 or 0, hardly ever learned: some groups differ and some do not."""
    return float(trajectory.num_sampled_tokens % 3 == 0)
