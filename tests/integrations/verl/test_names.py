"""All names that programs import from `trinity_sync.integrations.verl`, and what comes with them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinity_sync.integrations import verl

PROGRAM = """
import sys
from trinity_sync.integrations import verl
print(*(name for name in ("torch", "verl", "megatron", "ray") if name in sys.modules))
from trinity_sync.integrations.verl import (
    megatron_save_state_dict,
    megatron_state_dict_meta,
    megatron_sync_weight_nccl,
    megatron_upload_state_dict,
)
print(*(name for name in ("verl", "megatron") if name in sys.modules))
"""


@pytest.mark.all
def test_the_functions_over_megatron_are_there_and_bring_no_engine_with_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "\n\n"


def test_what_is_not_there_is_said_to_be_missing() -> None:
    assert set(verl.__all__) == set(verl._HOME)
    with pytest.raises(AttributeError, match="no attribute 'megatron_fly'"):
        _ = verl.megatron_fly
