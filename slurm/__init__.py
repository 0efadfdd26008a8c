"""All talk with Slurm, and the local stand-in for it: executors, exit records, ledger, verdict. No RL."""
