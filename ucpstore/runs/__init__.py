"""Runs: folders of checkpoints. What lies there, which of it is the latest, and what may go."""
