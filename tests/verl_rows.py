"""Data in the columns in which verl's preparation of GSM8K writes it."""

from __future__ import annotations

from pathlib import Path

import pyarrow
from pyarrow import parquet

ASKED = 'Let\'s think step by step and output the final answer after "####".'


def write_problems(path: Path, count: int, split: str) -> Path:
    """Sums, told as stories."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Ann has {n} pens and buys {n + 2}. How many are there? {ASKED}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n + 2)},
            "extra_info": {
                "split": split,
                "index": n,
                "answer": f"{n} + {n + 2} = {2 * n + 2}\n#### {2 * n + 2}",
                "question": f"Ann has {n} pens and buys {n + 2}. How many are there?",
            },
        }
        for n in (range(count) if split == "train" else range(1000, 1000 + count))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
