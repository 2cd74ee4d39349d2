"""verl's own SFT trainer on CPUs, for `torch.distributed.run`: nothing of it is changed but how the ranks meet, for
verl asks torch for two backends of one device there, which torch refuses.
"""

from __future__ import annotations

import verl.utils.distributed as verl_distributed

from tests.verl_programs.on_cpu import meet

if __name__ == "__main__":
    verl_distributed.initialize_global_process_group = meet
    from verl.trainer import sft_trainer

    sft_trainer.main()
