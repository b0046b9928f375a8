"""JointSpar and JointSpar-LARS: bandit, traffic, backward time, accuracy, wall clock."""
