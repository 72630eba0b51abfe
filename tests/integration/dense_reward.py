"""A reward that an untrained policy already varies in, so that short runs have something to train on."""


def answer_length(task, trajectory, evidence):
    return trajectory.num_sampled_tokens / 100
