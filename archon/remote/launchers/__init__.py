"""Launchers of inference servers: local processes, Slurm and Ray."""
