"""Offline: figures and tables from the files of a run. No GPU, no cluster."""
