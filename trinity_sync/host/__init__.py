"""What a process gets from its host: locks, durable files, signals, logs, memory. Imports nothing heavy."""
