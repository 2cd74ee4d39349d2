"""The command `trinity-sync`, with a module for each group of commands."""
