"""From draws to finished groups: worker processes, outcomes, staleness."""
