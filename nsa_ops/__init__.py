"""The operator's side: pods, runs and backups, over a transport. Importing this imports nothing else."""
