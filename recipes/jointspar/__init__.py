"""Experiments on JointSpar and JointSpar-LARS: bandit, traffic, backward time, accuracy."""
