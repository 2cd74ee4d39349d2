"""verl's own SFT trainer on CPUs, whose data loader cannot tell its state at the save of step 4."""

from __future__ import annotations

from typing import Any

import verl.utils.distributed as verl_distributed
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.verl_programs.on_cpu import meet

_real = StatefulDataLoader.state_dict
_calls: list[int] = []


def state_dict(self: Any) -> dict[str, Any]:
    _calls.append(len(_calls))
    if len(_calls) == 2:
        raise RuntimeError("planted: no state")
    told: dict[str, Any] = _real(self)
    return told


if __name__ == "__main__":
    verl_distributed.initialize_global_process_group = meet
    StatefulDataLoader.state_dict = state_dict
    from verl.trainer import sft_trainer

    sft_trainer.main()
