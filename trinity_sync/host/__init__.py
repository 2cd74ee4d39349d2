"""Functions of a process on its host: locks, durable files, signals, logs, memory. Imports nothing heavy."""
