"""The contents of a checkpoint folder: files, leases, locks, commits and deletion."""
