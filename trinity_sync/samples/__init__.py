"""The data between explorers and trainer: prompts, samples and their batches, and the rules that assign and judge them.

Needs numpy and nothing heavier.
"""
