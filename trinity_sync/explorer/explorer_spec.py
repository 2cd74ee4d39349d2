"""The plain values that an explorer is built from. The driver makes them, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trinity_sync.config.checks import sync_settings
from trinity_sync.config.lora_settings import adapter_of, travels
from trinity_sync.config.schema import Config, VllmConfig, VllmServerConfig
from trinity_sync.host.references import Settings
from trinity_sync.protocol.rounds import RoundMember

_OF_THE_POOL = ("kind", "replicas", "max_restarts", "check_agreement", "timeout_s")
"""Keys of `explorer` that engines do not get."""


@dataclass(frozen=True, kw_only=True)
class ExplorerSpec:
    """The values that an explorer is built from."""

    member: RoundMember  # its name, such as ``"explorer-0"``, and a number that each restart changes
    engine: Mapping[str, object]  # class of the `RolloutEngine`, and its keyword arguments
    task: Settings  # the `task` node of the config, to be instantiated in the explorer for its rewards
    seed: int
    deterministic: bool
    sync: Mapping[str, object]  # the `sync` node of the config, to be instantiated for the explorer's half of the mode
    verify: str
    sync_timeout_s: float  # a `WaitLimit`
    log_dir: str | None
    processes: int = 1  # processes that hold its weights; one GPU each where there are GPUs

    @property
    def name(self) -> str:
        return self.member.name


def explorer_spec(cfg: Config, model_path: str, log_dir: str) -> ExplorerSpec:
    """Make the spec that all explorers share, without a `member`."""
    engine = {name: value for name, value in vars(cfg.explorer).items() if name not in _OF_THE_POOL} | {
        "model_path": model_path,
        "response_length": cfg.task["response_length"],
        "prompt_length": cfg.task.get("prompt_length"),
        "seed": cfg.seed,
        "attn_implementation": cfg.model.attn_implementation,
        "trust_remote_code": cfg.model.trust_remote_code,
    }
    # only where they are set, so that users' engines need not know them
    if cfg.task.get("too_long") == "truncate":
        engine["truncate_prompts"] = True
    if cfg.task.get("chat_template"):
        engine["chat_template"] = cfg.task["chat_template"]
    if cfg.sync.keep_fp32 is not None:
        engine["keep_fp32"] = list(cfg.sync.keep_fp32)
    if isinstance(cfg.explorer, VllmServerConfig):
        engine |= {"timeout_s": cfg.explorer.timeout_s, "start_timeout_s": cfg.cluster.start_timeout_s}
    if travels(cfg) == "adapter":
        adapter = adapter_of(cfg.model.lora)
        assert adapter is not None, "an adapter travels only if one is trained"
        engine["adapter"] = adapter
    return ExplorerSpec(
        member=RoundMember.new(""),
        engine=engine,
        task=cfg.task,
        seed=cfg.seed,
        deterministic=cfg.trainer.deterministic and cfg.trainer.schedule == "lockstep",
        sync=sync_settings(vars(cfg.sync), cfg.explorer.kind),
        verify=cfg.sync.verify,
        sync_timeout_s=cfg.sync.limit_s,
        log_dir=log_dir,
        processes=_processes(cfg),
    )


def _processes(cfg: Config) -> int:
    if isinstance(cfg.explorer, VllmServerConfig):
        return 0  # its server has them
    return cfg.explorer.tp if isinstance(cfg.explorer, VllmConfig) else 1
