"""The operator's side: pods, runs and backups over a transport. Importing it imports nothing."""
