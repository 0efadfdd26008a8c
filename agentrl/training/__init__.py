"""Turning groups into better weights: GRPO, packing, back ends, checkpoints, SFT."""
