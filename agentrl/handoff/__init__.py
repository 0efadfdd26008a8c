"""Trajectories on their way from rollout to trainer, as files."""
