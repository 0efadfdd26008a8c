"""The learning loop: tasks, sandboxes, agents, engines, rollout, weights, training. No Slurm."""
