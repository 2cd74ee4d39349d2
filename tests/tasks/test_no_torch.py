from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["samples", "tasks"])
def test_importing_all_modules_loads_nothing_heavy(package: str) -> None:
    script = f"""
import importlib, pkgutil, sys
import trinity_sync.{package} as package
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(sorted({{"torch", "transformers", "ray", "pyarrow", "hydra"}} & sys.modules.keys()))
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
