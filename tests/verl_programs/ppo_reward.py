"""The reward of verl's PPO program: how many bytes of the answer are small."""

from __future__ import annotations


def compute_score(solution_str: str, **_: object) -> float:
    return sum(ord(character) < 64 for character in solution_str) / max(1, len(solution_str))
