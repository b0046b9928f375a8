"""Experiments on JointSpar and JointSpar-LARS: traffic, backward time, accuracy."""
