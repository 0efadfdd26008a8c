"""All talk with Slurm, and the local stand-in: executors, exit records, ledger, verdict. No RL."""
