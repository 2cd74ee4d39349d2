"""verl's own SFT trainer with its Megatron engine on CPUs: beside what `sft_on_cpu` does, the engine that runs there is
registered, and, where a user asks for our vendor, as one that saves through us.
"""

from __future__ import annotations

if __name__ == "__main__":  # verl's own saves start processes that import this
    import verl.utils.distributed as verl_distributed
    from verl.workers.engine import EngineRegistry

    from tests.verl_programs.on_cpu import meet
    from trinity_sync.backends.megatron import megatron_engine
    from trinity_sync.integrations.verl.vendor import VENDOR, is_on

    verl_distributed.initialize_global_process_group = meet
    megatron_engine.prepare()
    if is_on():
        from trinity_sync.integrations.verl.engine_registry import through_us

        ours = through_us(megatron_engine.MegatronEngine)
        EngineRegistry.register("language_model", ["megatron"], device=megatron_engine.DEVICE, vendor=VENDOR)(ours)

    from verl.trainer import sft_trainer

    sft_trainer.main()
