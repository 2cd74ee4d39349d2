"""What passes between explorers and trainer: prompts, samples, their batches, and the rules that assign and judge them.

Needs numpy and nothing heavier.
"""
