"""A LoRA run's full checkpoints on real engines: the adapter alone is written, and comes back strictly."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.backends.engines import Ranks, _engine, _step, adapted, go_through, write_state

CASES = [{"strategy": strategy, "format": form} for strategy in ("fsdp", "fsdp2") for form in ("verl", "dcp")]

pytestmark = pytest.mark.all


def _examine(case: Mapping[str, Any], models: Path, saves: Path, rank: int, ranks: int) -> dict[str, Any]:
    import torch.distributed as dist

    from trinity_sync.backends.fsdp_state import FsdpState, peft_config, write_adapter_config
    from trinity_sync.errors import RunError

    model = models / "tied"
    engine = adapted(model, case["strategy"], 4)
    state = FsdpState(engine)
    for number in range(3):
        _step(engine, rank, number)
    actor = saves / "actor"
    write_state(state, case["format"], actor)
    facts: dict[str, Any] = {"saved": _local(engine), "folder": str(actor)}
    if rank == 0:
        write_adapter_config(peft_config(engine.module), actor)
    _step(engine, rank, 3)
    facts["next"] = _local(engine)
    state.load(actor)
    facts["loaded"] = _local(engine)
    _step(engine, rank, 3)
    facts["next_after_load"] = _local(engine)
    if case["format"] == "verl":
        engine.checkpoint_manager.load_checkpoint(str(actor))
        facts["loaded_by_verl"] = _local(engine)

    def refused(other: Any) -> str:
        try:
            FsdpState(other).load(actor)
        except RunError as error:
            return str(error)
        return ""

    facts["into_full"] = refused(_engine(str(model), case["strategy"], -1))
    facts["into_other_rank"] = refused(adapted(model, case["strategy"], 2))
    facts["into_other_targets"] = refused(adapted(model, case["strategy"], 4, ["q_proj"]))
    dist.barrier()
    return facts


def _local(engine: Any) -> dict[str, str]:
    """Digest of what this rank holds of each parameter, and of the optimizer's states."""
    from tests.backends.engines import _hash

    found = {name: _hash({"value": value}) for name, value in engine.module.named_parameters()}
    return {**found, "optimizer": _hash({"value": engine.optimizer.state_dict()["state"]})}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return Ranks(tmp_path_factory.mktemp("lora"), 2, CASES, {}, partial(go_through, _examine)).facts()


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(case.values()) for case in CASES])
class TestACheckpointOfAnAdapter:
    def test_comes_back_bitwise_and_the_next_step_is_the_same(self, facts: Any, case: int) -> None:
        for of_rank in facts[case]:
            assert of_rank["loaded"] == of_rank["saved"] != of_rank["next"]
            assert of_rank["next_after_load"] == of_rank["next"]

    def test_verl_reads_it(self, facts: Any, case: int) -> None:
        for of_rank in facts[case]:
            assert of_rank.get("loaded_by_verl", of_rank["saved"]) == of_rank["saved"]

    def test_does_not_go_into_another_model(self, facts: Any, case: int) -> None:
        for of_rank in facts[case]:
            assert "holds a LoRA adapter, which does not fit the model that is trained" in of_rank["into_full"]
            assert "lora_A.default.weight with shape [4, 64], but the adapter has [2, 64]" in of_rank["into_other_rank"]
            assert "which the adapter does not have" in of_rank["into_other_targets"]
