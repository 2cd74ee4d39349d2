"""Runs Trinity Sync from a checkout: `python launch.py [overrides]`, see `python launch.py --help`.

Composes and checks the configuration; nothing heavy is imported before that is done.
"""

from __future__ import annotations

import sys

import trinity_sync.cli  # noqa: F401 - first: from then on Ctrl-C is told in one line

# isort: split
import hydra
from omegaconf import DictConfig

from trinity_sync.host.interrupts import end_program
from trinity_sync.launch import app


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Run one job with a composed configuration."""
    return app.job(cfg)


if __name__ == "__main__":
    end_program()
    sys.exit(app.run_main(main))
