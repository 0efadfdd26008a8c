"""The learning loop: tasks, sandboxes, agents, engines, rollout, handoff, weights, training. No Slurm."""
