"""The real vLLM, given versions by a trainer of which nothing is real but what it stages."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.explorer.helpers import loaded
from tests.sync.helpers import LIMIT, PretendTrainer, node_id, remote_agent  # noqa: F401
from tests.vllm.helpers import PROMPTS, TASK, Weights, log_probs_of_transformers
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.explorer.vllm import VLLMEngine
from trinity_sync.host.interrupts import ENDING
from trinity_sync.host.threads import in_background
from trinity_sync.integrations.vllm.control import OnUpdate
from trinity_sync.integrations.vllm.own import EngineWeights
from trinity_sync.protocol.parts import shard_file
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.protocol.versions import Version
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.samples.record import Drawing, Purpose
from trinity_sync.sync import Synchronizer
from trinity_sync.sync.base import ExplorerSide, LayoutCache, LeaseFolder, SyncMode
from trinity_sync.sync.checkpoint import CheckpointMode
from trinity_sync.sync.memory import MemoryMode
from trinity_sync.sync.weight_loader import WeightLoader
from trinity_sync.weights.slots import DEFAULT_ROOT

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[VLLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "4")  # so that few requests are handed on as many are
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # so that faults can be planted in a worker
        yield from _started(models[0])


def _started(model: Path) -> Iterator[VLLMEngine]:
    made = VLLMEngine(
        str(model),
        dtype="bf16",
        temperature=1.0,
        batch_size=64,
        response_length=6,
        seed=0,
        eager=True,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def make_loader(engine: VLLMEngine, trainer: PretendTrainer) -> Callable[..., WeightLoader]:
    def make(
        mode: SyncMode | None = None,
        verify: str = "full",
        of: PretendTrainer = trainer,
        lease_folder: LeaseFolder | None = None,
        still_leased: Callable[[int], bool] | None = None,
        **settings: object,
    ) -> WeightLoader:
        mode = mode or MemoryMode()
        target = {"_target_": f"{type(mode).__module__}.{type(mode).__name__}"}
        layouts = LayoutCache(of.agents, LIMIT)
        side = ExplorerSide(
            name="explorer-0",
            node=node_id(),
            agents=of.agents,
            layouts=layouts,
            timeout_s=LIMIT,
            settings=target | settings,
            lease_folder=lease_folder,
            still_leased=still_leased or (lambda lease_id: of.synchronizer.holds(lease_id).result(LIMIT)),
        )
        return WeightLoader(RoundMember.new("explorer-0"), engine.target(mode, side, verify), of.synchronizer)

    return make


@pytest.fixture
def loader(make_loader: Callable[..., WeightLoader]) -> WeightLoader:
    return make_loader()


def generated(engine: VLLMEngine, step: int = 1, samples: int = 3) -> SampleBatch:
    return engine.generate(PROMPTS, TASK, step=step, samples_per_prompt=samples, version=(0, 0))


def test_versions_are_taken_and_generated_with(
    engine: VLLMEngine,
    loader: WeightLoader,
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
) -> None:
    for path, of in zip(models[:3], weights[:3], strict=True):
        sealed = trainer.publish(of)
        report = loader.load(None)
        assert report.version == sealed.version == loader.held
        assert report.digest == reference_digest(of, "BF16")
        assert report.bytes_moved == sum(layout.nbytes for layout in trainer.layouts.values())
        assert engine._control.wait(engine._llm.get_weight_version(), "tell its version") == str(sealed.version)
        batch = generated(engine)
        np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(path, batch), atol=0.02)


def test_samples_depend_on_seed_step_prompt_and_sample_only(engine: VLLMEngine, loader: WeightLoader) -> None:
    batch, again = generated(engine), generated(engine)
    assert batch.texts == again.texts
    alone = engine.generate(PROMPTS[2:3], TASK, step=1, samples_per_prompt=3, version=(0, 0))
    assert alone.texts == batch.texts[6:9]
    assert generated(engine, step=2).texts != batch.texts
    assert len(set(batch.texts)) > 6
    assert all(
        len(text) == length - done
        for text, length, done in zip(batch.texts, batch.responses.lengths, batch.finished, strict=True)
    )


def test_signals_that_end_a_run_do_not_reach_its_processes(
    engine: VLLMEngine, loader: WeightLoader, trainer: PretendTrainer, weights: list[Weights]
) -> None:
    trainer.publish(weights[0])
    assert loader.load(None).version == loader.held
    (core,) = engine.workers
    for signum in ENDING:
        os.kill(core, signum)
    assert len(generated(engine)) == 3 * len(PROMPTS)


def test_a_validation_has_a_temperature_and_random_numbers_of_its_own(engine: VLLMEngine, loader: WeightLoader) -> None:
    def validated(temperature: float | None, step: int = 1) -> SampleBatch:
        drawing = Drawing(purpose=Purpose.VALIDATION, temperature=temperature)
        return engine.generate(PROMPTS, TASK, step=step, samples_per_prompt=3, version=(0, 0), drawing=drawing)

    trained = generated(engine)
    assert validated(1.0).texts == validated(None).texts != trained.texts
    greedy = validated(0.0)
    assert greedy.texts == validated(0.0, step=2).texts
    assert all(len({*greedy.texts[first : first + 3]}) == 1 for first in range(0, len(greedy), 3))
    assert generated(engine).texts == trained.texts


def test_what_becomes_of_a_slot_after_the_load_does_not_change_the_model(
    engine: VLLMEngine, loader: WeightLoader, trainer: PretendTrainer, models: list[Path], weights: list[Weights]
) -> None:
    """Workers read the version where it lies, and a later one is written to that place."""
    sealed = trainer.publish(weights[1])
    loader.load(None)
    for part, layout in trainer.layouts.items():
        with trainer.segment(sealed.slot, part, writable=True) as segment:
            staged = segment[:]
            segment[:] = bytes(byte ^ 0x55 for byte in staged)
            batch = generated(engine)
            segment[:] = staged
        assert layout.nbytes == len(staged)
        np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[1], batch), atol=0.02)


def of_model(worker: Any) -> None:
    """In a worker: have the model use a tensor, once, where the version lies."""
    transfer = worker.weight_transfer_engine
    whole = transfer.finish_weight_update

    def finish() -> None:
        transfer.finish_weight_update = whole
        whole()
        norm = transfer.model.get_parameter(NORM)
        norm.data = max(transfer._arrivals.memory(), key=torch.Tensor.numel).view(-1)[: norm.numel()]

    transfer.finish_weight_update = finish


def own_again(worker: Any) -> None:
    """In a worker: give the model memory of its own for it."""
    norm = worker.weight_transfer_engine.model.get_parameter(NORM)
    norm.data = norm.data.clone()


def test_a_model_that_uses_the_memory_of_a_version_is_found_out(
    engine: VLLMEngine, loader: WeightLoader, trainer: PretendTrainer, weights: list[Weights]
) -> None:
    trainer.publish(weights[0])
    engine._control.wait(engine._llm.collective_rpc(of_model), "plant a fault")
    with pytest.raises(RunError, match=rf"vLLM did not copy {NORM}, but uses them where the version lies"):
        loader.load(None)
    assert loader.held is None
    engine._control.wait(engine._llm.collective_rpc(own_again), "give memory back")
    loader.load(None)


def test_a_lease_that_is_lost_in_the_session_leaves_the_engine_paused(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
) -> None:
    trainer.publish(weights[3])

    def lose(lease_id: int) -> bool:
        assert trainer.synchronizer.holds(lease_id).result(LIMIT)
        assert trainer.synchronizer.release(lease_id).result(LIMIT)
        return trainer.synchronizer.holds(lease_id).result(LIMIT)

    def is_paused() -> bool:
        return engine._control.wait(engine._llm.is_paused(), "tell whether it is paused")

    assert not is_paused()
    loader = make_loader(verify="bucket", still_leased=lose)
    with pytest.raises(RunError, match=r"explorer-0 lost its lease on version .*; raise sync\.lease_s"):
        loader.load(None)
    assert loader.held is None
    assert is_paused()
    make_loader(verify="bucket").load(None)
    assert not is_paused()
    batch = generated(engine)
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[3], batch), atol=0.02)


class Kept:
    """A hold on a version's folder: what the engine said was its version when the hold ended, and what was renewed."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self.ended_at: list[str] = []
        self.renewed = 0

    @contextmanager
    def lease(self, folder: Path, version: Version) -> Iterator[Callable[[], None]]:
        yield self._renew
        told = self._engine._llm.get_weight_version()
        self.ended_at.append(self._engine._control.wait(told, "tell its version"))

    def _renew(self) -> None:
        self.renewed += 1


@pytest.mark.parametrize("verify", ["full", "bucket", "off"])
def test_files_of_a_checkpoint_are_read_by_the_workers(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    agent: AgentClient,
    weights: list[Weights],
    tmp_path: Path,
    verify: str,
) -> None:
    sealed = trainer.seal(weights[0])
    agent.write(sealed.slot, str(tmp_path), {}, fsync=False).result(LIMIT)
    trainer.synchronizer.commit(sealed.version, str(tmp_path)).result(LIMIT)
    kept = Kept(engine)
    report = make_loader(CheckpointMode(durable=False), verify, lease_folder=kept.lease, durable=False).load(None)
    assert report.digest == (reference_digest(weights[0], "BF16") if verify == "full" else None)
    assert kept.ended_at == [str(sealed.version)], "the folder is kept until its files are read"
    assert kept.renewed > 1
    [pid] = engine.workers
    assert str(tmp_path) not in Path(f"/proc/{pid}/maps").read_text()


def test_a_damaged_file_of_a_checkpoint_never_reaches_the_engine(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    agent: AgentClient,
    models: list[Path],
    weights: list[Weights],
    tmp_path: Path,
) -> None:
    loader = make_loader(CheckpointMode(durable=False), durable=False)
    for of in weights[1:3]:
        sealed = trainer.seal(of)
        folder = tmp_path / str(sealed.version)
        folder.mkdir()
        agent.write(sealed.slot, str(folder), {}, fsync=False).result(LIMIT)
        if of is weights[1]:
            trainer.synchronizer.commit(sealed.version, str(folder)).result(LIMIT)
            before = loader.load(None).version
    name, byte = first_byte(trainer)
    with (folder / shard_file(min(trainer.layouts))).open("r+b") as file:
        file.seek(byte - trainer.layouts[min(trainer.layouts)].nbytes, os.SEEK_END)
        [old] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old ^ 0xFF]))
    trainer.synchronizer.commit(sealed.version, str(folder)).result(LIMIT)
    with pytest.raises(RunError, match=rf"explorer-0 cannot load version .* it holds .* damaged: {re.escape(name)}$"):
        loader.load(None)
    assert loader.held == before
    batch = generated(engine)
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[1], batch), atol=0.02)


def first_byte(trainer: PretendTrainer) -> tuple[str, int]:
    """Of the first tensor of which the first part holds something: its name, and a byte of it in the segment."""
    layout = trainer.layouts[min(trainer.layouts)]
    return next((shard.name, offset) for shard, offset in layout.entries if shard.rects)


def test_damaged_bytes_never_reach_the_engine(
    engine: VLLMEngine,
    loader: WeightLoader,
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
) -> None:
    before = trainer.publish(weights[1])
    loader.load(None)
    sealed = trainer.publish(weights[2])
    part = min(trainer.layouts)
    trainer.damage(sealed, part, 5)
    with pytest.raises(RunError, match=r"^explorer-0 cannot load version .* it holds .* damaged"):
        loader.load(sealed.version)
    assert loader.held == before.version
    batch = generated(engine)
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[1], batch), atol=0.02)
    trainer.damage(sealed, part, 5)
    assert loader.load(sealed.version).digest == sealed.digest


# ---- an engine of one's own, with requests under way


class Asked(NamedTuple):
    """What became of requests that were under way in an update: tokens and log-probs of each, and how it ended."""

    batch: list[tuple[list[int], list[float]]]
    reasons: set[str]


async def under_way(engine: VLLMEngine, begun: threading.Event, of: str) -> Asked:
    """Ask for 8 long responses; tell when each of them has begun."""
    sampling = SamplingParams(
        max_tokens=96, ignore_eos=True, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    waiting = set(range(8))

    async def one(number: int) -> tuple[list[int], list[float], str]:
        tokens: list[int] = []
        log_probs: list[float] = []
        async for output in engine._llm.generate({"prompt_token_ids": [3, 4, 5]}, sampling, f"{of}-{number}"):
            [made] = output.outputs
            tokens += made.token_ids
            log_probs += [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
            waiting.discard(number)
            if not waiting:
                begun.set()
        return tokens, log_probs, str(made.finish_reason)

    done = await asyncio.gather(*map(one, range(8)))
    return Asked([(tokens, log_probs) for tokens, log_probs, _ in done], {reason for *_, reason in done})


def made_by(model: Path, asked: Asked) -> list[np.ndarray]:
    """For each request, whether each token has the log-prob that transformers gives it with the weights of a folder."""
    held = loaded(model, dtype="bf16").model
    found = []
    for tokens, log_probs in asked.batch:
        ids = torch.tensor([[3, 4, 5, *tokens]])
        with torch.inference_mode():
            expected = held(ids).logits[0, 2:-1].float().log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0].numpy()
        found.append(np.abs(expected - np.array(log_probs)) < 0.03)
    return found


@pytest.mark.parametrize("on_update", ["wait", "keep", "abort"])
def test_requests_under_way_are_finished_kept_or_aborted(
    engine: VLLMEngine, weights: list[Weights], models: list[Path], on_update: OnUpdate
) -> None:
    own = EngineWeights(engine._llm, engine._loop, on_update=on_update, timeout_s=LIMIT)
    before = {name: tensor.bfloat16() for name, tensor in weights[0].items()}
    after = {name: tensor.bfloat16() for name, tensor in weights[3].items()}
    assert own.take(before, 5) == reference_digest(weights[0], "BF16")
    begun = threading.Event()
    asking = asyncio.run_coroutine_threadsafe(under_way(engine, begun, on_update), engine._loop)
    assert begun.wait(LIMIT)
    assert own.take(after, 6) == reference_digest(weights[3], "BF16")
    asked = asking.result(LIMIT)
    own.close()
    old, new = made_by(models[0], asked), made_by(models[3], asked)
    if on_update == "wait":
        assert asked.reasons == {"length"}
        assert all(len(tokens) == 96 for tokens, _ in asked.batch)
        assert all(of.all() for of in old)
    elif on_update == "keep":
        assert asked.reasons == {"length"}
        assert all(len(tokens) == 96 for tokens, _ in asked.batch)
        for by_old, by_new in zip(old, new, strict=True):
            assert by_old[0]
            assert not by_old.all(), "the update came when all tokens were there"
            first = int(np.argmin(by_old))
            assert by_old[:first].all()
            assert by_new[first + 1 :].mean() > 0.5, "keys and values of the tokens before are worked out anew"
    else:
        assert asked.reasons == {"abort"}
        assert all(len(tokens) < 96 for tokens, _ in asked.batch)
        assert all(of.all() for of in old)


# ---- versions that a run's explorer takes while it generates


def steps_take(worker: Any, seconds: float) -> None:
    """In a worker: have each step take so much longer; 0 has them go on as they are."""
    vars(worker).pop("execute_model", None)
    step = worker.execute_model
    if seconds:

        def slowly(*args: object) -> object:
            time.sleep(seconds)
            return step(*args)

        worker.execute_model = slowly


@pytest.fixture
def slow_steps(engine: VLLMEngine) -> Iterator[None]:
    engine._control.wait(engine._llm.collective_rpc(partial(steps_take, seconds=0.01)), "be slow")
    yield
    engine._control.wait(engine._llm.collective_rpc(partial(steps_take, seconds=0.0)), "be as it is")


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("on_update", ["keep", "abort"])
@pytest.mark.few(1)
def test_each_token_bears_the_version_that_made_it(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
    monkeypatch: pytest.MonkeyPatch,
    on_update: OnUpdate,
) -> None:
    """Also where the front end has not handed on yet what was made long before."""
    monkeypatch.setattr(engine, "_on_update", on_update)
    monkeypatch.setattr(engine, "_response_length", 96)
    monkeypatch.setattr(engine, "_ends", [])
    begun, made_by_engine = threading.Event(), itertools.count()
    processor = engine._llm.output_processor
    process = processor.process_outputs

    def slowly(*args: Any) -> Any:
        if next(made_by_engine) == 24:
            begun.set()
        time.sleep(0.005)
        return process(*args)

    monkeypatch.setattr(processor, "process_outputs", slowly)
    loader = make_loader()
    old = trainer.publish(weights[0]).version
    loader.load(None)
    new = trainer.publish(weights[3]).version
    made = in_background(partial(generated, engine, samples=8), "generate")
    assert begun.wait(LIMIT)
    loader.load(None)
    batch = made.result(LIMIT)
    by_new = np.zeros(batch.token_count, np.bool_)
    for row in range(len(batch)):
        for start, end, step in batch.spans.of_sample(row):
            assert step in {old.step, new.step}
            by_new[batch.responses.offsets[row] + start : batch.responses.offsets[row] + end] = step == new.step
    assert set(batch.responses.lengths) == {96}
    if on_update == "keep":
        assert batch.spans.mixed.all()
        assert not by_new.all()
    else:
        assert not batch.spans.mixed.any()
        assert by_new.any()
    assert (batch.version_steps == old.step).tolist() == [not new for new in by_new[batch.responses.offsets[:-1]]]
    for model, mask in ((models[0], ~by_new), (models[3], by_new)):
        expected = log_probs_of_transformers(model, batch)
        np.testing.assert_allclose(batch.log_probs[mask], expected[mask], atol=0.04)


def test_what_is_made_ends_when_the_weights_are_lost_until_a_version_is_taken(
    engine: VLLMEngine, loader: WeightLoader, trainer: PretendTrainer, weights: list[Weights]
) -> None:
    trainer.publish(weights[0])
    loader.load(None)
    engine._control.pause("keep")
    made = in_background(partial(generated, engine), "generate")
    while not engine._requests:
        assert not made.done()
    engine.give_up()
    with pytest.raises(RunError, match="its weights were lost in an update"):
        made.result(LIMIT)
    with pytest.raises(RunError, match="its weights were lost in an update"):
        generated(engine)
    trainer.publish(weights[1])
    loader.load(None)
    assert len(generated(engine)) == 12


def test_what_arrived_for_one_explorer_is_never_put_in_for_another(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    trainer: PretendTrainer,
    weights: list[Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even where another one comes between the arrival and the update."""
    first = make_loader()
    trainer.publish(weights[1])
    control = engine._control
    start = control.start_update

    def another_comes(version: str) -> None:
        monkeypatch.undo()
        own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
        own.take({name: tensor.bfloat16() for name, tensor in weights[2].items()}, 0)
        own.close()
        start(version)

    monkeypatch.setattr(control, "start_update", another_comes)
    with pytest.raises(RunError, match="another explorer gives this engine its versions now"):
        first.load(None)
    assert first.held is None
    with pytest.raises(RunError, match="another explorer gives this engine its versions now"):
        first.load(None)
    later = make_loader()
    assert later.load(None).digest == reference_digest(weights[1], "BF16")


# ---- an update that fails


def of_worker(worker: Any, method: str) -> None:
    """In a worker: have a method of our transfer fail once."""
    transfer = worker.weight_transfer_engine
    whole = getattr(transfer, method)

    def fails(*args: object) -> None:
        setattr(transfer, method, whole)
        raise OSError("planted")

    setattr(transfer, method, fails)


@pytest.mark.parametrize("method", ["start_weight_update", "_load", "finish_weight_update"])
def test_an_update_that_raises_leaves_no_version_and_the_next_one_gets_in(
    engine: VLLMEngine,
    loader: WeightLoader,
    trainer: PretendTrainer,
    models: list[Path],
    weights: list[Weights],
    method: str,
) -> None:
    trainer.publish(weights[0])
    loader.load(None)
    engine._control.wait(engine._llm.collective_rpc(partial(of_worker, method=method)), "plant a fault")
    sealed = trainer.publish(weights[1])
    with pytest.raises(RunError, match=r"vLLM of explorer-0 failed to .*(\n.*)*planted"):
        loader.load(None)
    assert loader.held is None
    assert loader.load(None).digest == sealed.digest
    assert loader.held == sealed.version
    batch = generated(engine)
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[1], batch), atol=0.02)


def test_a_pause_that_fails_after_an_update_that_failed_lets_nothing_go_on(
    engine: VLLMEngine,
    loader: WeightLoader,
    trainer: PretendTrainer,
    weights: list[Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer.publish(weights[0])
    loader.load(None)
    engine._control.wait(engine._llm.collective_rpc(partial(of_worker, method="_load")), "plant a fault")
    trainer.publish(weights[1])
    with pytest.raises(RunError, match="planted"):
        loader.load(None)

    def late(how: str) -> None:
        raise WaitTimeout("vLLM", "pause", 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(engine._control, "pause", late)
        with pytest.raises(RunError, match="vLLM did not pause within 1 s"):
            loader.load(None)
    assert engine._control.wait(engine._llm.is_paused(), "say whether it is paused")
    loader.load(None)
    assert not engine._control.wait(engine._llm.is_paused(), "say whether it is paused")


@pytest.fixture
def unfinished(
    make_synchronizer: Callable[..., Synchronizer], make_agent: Callable[..., AgentClient], weights: list[Weights]
) -> PretendTrainer:
    """A trainer whose versions lack a tensor of the model."""
    other = make_synchronizer().client
    lacking = {name: tensor for name, tensor in weights[0].items() if name != NORM}
    made = PretendTrainer(other, {node_id(): make_agent(other)}, weights=lacking, bucket_bytes=1 << 16)
    made.publish(lacking)
    return made


def test_a_version_that_does_not_fit_is_refused_before_the_engine_hears_of_it(
    engine: VLLMEngine, loader: WeightLoader, make_loader: Callable[..., WeightLoader], unfinished: PretendTrainer
) -> None:
    held = loader.held
    with pytest.raises(RunError, match=rf"1 missing \({NORM}\)"):
        make_loader(of=unfinished).load(None)
    assert len(generated(engine)) == len(PROMPTS) * 3
    assert loader.held == held


def test_a_version_that_leaves_tensors_of_the_model_unfilled_is_none(
    engine: VLLMEngine,
    make_loader: Callable[..., WeightLoader],
    unfinished: PretendTrainer,
    monkeypatch: pytest.MonkeyPatch,
    trainer: PretendTrainer,
    weights: list[Weights],
) -> None:
    """As where vLLM calls a tensor by another name than transformers, and would leave it as it was."""
    monkeypatch.setattr(engine, "_shapes", {name: of for name, of in engine._shapes.items() if name != NORM})
    with pytest.raises(RunError, match=rf"does not fill {NORM} of Qwen3ForCausalLM"):
        make_loader(of=unfinished).load(None)
    monkeypatch.undo()
    sealed = trainer.publish(weights[2])
    assert make_loader().load(None).digest == sealed.digest


@pytest.mark.parametrize(
    "lacking", ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight", NORM]
)
def test_what_a_layer_lacks_is_not_made_up(engine: VLLMEngine, weights: list[Weights], lacking: str) -> None:
    """Of a layer that vLLM has put together from several tensors, one does not come."""
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    whole = {name: tensor.bfloat16() for name, tensor in weights[1].items()}
    with pytest.raises(RunError, match=r"does not fill model\.(layers|norm)"):
        own.take({name: tensor for name, tensor in whole.items() if name != lacking}, 1)
    own.close()
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    own.take(whole, 2)
    own.close()


def test_a_tensor_that_vllm_would_round_is_refused(engine: VLLMEngine, weights: list[Weights]) -> None:
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    mixed = {name: tensor if name == NORM else tensor.bfloat16() for name, tensor in weights[1].items()}
    with pytest.raises(
        ConfigError, match=rf"vLLM would round {NORM}: they are sent in fp32, and the worker holds them in BF16"
    ):
        own.take(mixed, 1)
    own.close()


def test_the_memory_in_which_versions_are_handed_over_is_given_back(engine: VLLMEngine, weights: list[Weights]) -> None:
    def folders() -> set[Path]:
        return {*Path(DEFAULT_ROOT).glob("trinity-sync-*/vllm-*"), *Path(gettempdir()).glob("trinity-sync-*/vllm-*")}

    before = folders()
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    whole = {name: tensor.bfloat16() for name, tensor in weights[1].items()}
    own.take(whole, 1)
    [made] = folders() - before
    own.take(dict(reversed(whole.items())), 2)  # laid out otherwise
    [again] = folders() - before
    assert again != made
    own.close()
    assert folders() == before


def test_a_wait_of_vllms_own_is_not_taken_for_ours(engine: VLLMEngine) -> None:
    async def in_vain() -> None:
        raise TimeoutError("no answer of the scheduler")

    with pytest.raises(RunError, match="failed to look: TimeoutError: no answer of the scheduler") as caught:
        engine._control.wait(in_vain(), "look")
    assert not isinstance(caught.value, WaitTimeout)


def test_weights_that_are_no_numbers_are_taken_as_they_are(engine: VLLMEngine, weights: list[Weights]) -> None:
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    broken = {name: tensor.bfloat16() for name, tensor in weights[1].items()}
    broken[NORM] = torch.full_like(broken[NORM], torch.nan)
    own.take(broken, 1)
    own.take({name: tensor.bfloat16() for name, tensor in weights[1].items()}, 2)
    own.close()


def test_an_update_that_cannot_pause_in_time_leaves_the_engine_at_work(
    engine: VLLMEngine, weights: list[Weights], models: list[Path]
) -> None:
    own = EngineWeights(engine._llm, engine._loop, timeout_s=LIMIT)
    own.take({name: tensor.bfloat16() for name, tensor in weights[0].items()}, 1)
    begun = threading.Event()
    asking = asyncio.run_coroutine_threadsafe(under_way(engine, begun, "late"), engine._loop)
    assert begun.wait(LIMIT)
    own._control._timeout_s = 0.1
    with pytest.raises(WaitTimeout, match="did not pause within"):
        own.take({name: tensor.bfloat16() for name, tensor in weights[3].items()}, 2)
    asked = asking.result(LIMIT)
    assert asked.reasons == {"length"}
    own._control._timeout_s = LIMIT
    batch = generated(engine)
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(models[0], batch), atol=0.02)
    own.close()


def test_a_worker_that_is_killed_takes_the_explorer_with_it(
    engine: VLLMEngine, make_loader: Callable[..., WeightLoader]
) -> None:
    loader = make_loader()
    loader.load(None)
    [pid] = engine.workers
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeathError, match=rf"worker 0 of vLLM of explorer-0 \(pid {pid}\) has died"):
        loader.load(None)
