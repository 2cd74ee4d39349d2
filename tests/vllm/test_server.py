"""Real vLLM servers, given versions by a trainer of which nothing is real but what it stages."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.explorer.helpers import ARCHITECTURE
from tests.sync.helpers import LIMIT, PretendTrainer, node_id
from tests.vllm.helpers import PROMPTS, TASK, Weights, log_probs_of_transformers
from tests.vllm.servers import PLUG_IN, RealServer, serving
from tests.weights.helpers import reference_digest
from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.explorer_client import EngineDeathError
from trinity_sync.errors import ConfigError, RunError, WaitTimeout
from trinity_sync.explorer.vllm_server import VLLMServerEngine
from trinity_sync.host.locks import own_name
from trinity_sync.integrations.vllm.server import HttpControl, ServerClient
from trinity_sync.models.architecture import make_model
from trinity_sync.protocol.rounds import RoundMember
from trinity_sync.samples.batch import SampleBatch
from trinity_sync.sync.base import ExplorerSide, LayoutCache, SyncMode
from trinity_sync.sync.checkpoint import CheckpointMode
from trinity_sync.sync.memory import MemoryMode
from trinity_sync.sync.weight_loader import WeightLoader
from trinity_sync.weights.slots import DEFAULT_ROOT

WAYS = ("workers", "file")


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with serving(models[3], tmp_path_factory.mktemp("server") / "log", *PLUG_IN) as made:
        yield made


def engine_of(server: RealServer, model: Path, **changes: object) -> VLLMServerEngine:
    settings: dict[str, object] = {
        "url": server.url,
        "dtype": "bf16",
        "temperature": 1.0,
        "batch_size": 8,
        "response_length": 6,
        "seed": 0,
        "timeout_s": LIMIT,
        "start_timeout_s": LIMIT,
    }
    return VLLMServerEngine(str(model), **(settings | changes))  # type: ignore[arg-type]


def loader_of(
    engine: VLLMServerEngine, trainer: PretendTrainer, way: str, mode: SyncMode | None = None, verify: str = "full"
) -> WeightLoader:
    """What loads versions into an engine, by the server's workers or by files."""
    mode = mode or MemoryMode()
    engine._facts = engine._facts._replace(backend="trinity" if way == "workers" else None)
    settings = {"_target_": f"{type(mode).__module__}.{type(mode).__name__}"}
    if isinstance(mode, CheckpointMode):
        settings["durable"] = False  # type: ignore[assignment]
    side = ExplorerSide(
        name="explorer-0",
        node=node_id(),
        agents=trainer.agents,
        layouts=LayoutCache(trainer.agents, LIMIT),
        timeout_s=LIMIT,
        settings=settings,
    )
    return WeightLoader(RoundMember.new("explorer-0"), engine.target(mode, side, verify), trainer.synchronizer)


def generated(engine: VLLMServerEngine, step: int = 1) -> SampleBatch:
    return engine.generate(PROMPTS, TASK, step=step, samples_per_prompt=3, version=(0, 0))


def assert_made_by(model: Path, batch: SampleBatch) -> None:
    np.testing.assert_allclose(batch.log_probs, log_probs_of_transformers(model, batch), atol=0.02)


def files_left() -> list[Path]:
    return list(Path(DEFAULT_ROOT, own_name("trinity-sync")).glob(f"server-{os.getpid()}-*"))


@pytest.mark.all
@pytest.mark.parametrize("way", WAYS)
def test_versions_are_taken_and_generated_with(
    server: RealServer, models: list[Path], weights: list[Weights], trainer: PretendTrainer, way: str
) -> None:
    engine = engine_of(server, models[0])
    loader = loader_of(engine, trainer, way)
    for path, of in zip(models[:2], weights[:2], strict=True):
        sealed = trainer.publish(of)
        report = loader.load(None)
        assert report.version == sealed.version == loader.held
        assert report.digest == reference_digest(of, "BF16")
        assert str(server.get("/weight_info")["weight_version"]).startswith(f"{sealed.version}-")
        batch = generated(engine)
        assert_made_by(path, batch)
        assert generated(engine).texts == batch.texts
        assert generated(engine, step=2).texts != batch.texts
        assert all(
            len(text) == length - done
            for text, length, done in zip(batch.texts, batch.responses.lengths, batch.finished, strict=True)
        )
    assert not files_left()
    engine.close()


@pytest.mark.all
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verify", ["full", "bucket", "off"])
def test_files_of_a_checkpoint_are_taken(
    server: RealServer,
    models: list[Path],
    weights: list[Weights],
    trainer: PretendTrainer,
    agent: AgentClient,
    tmp_path: Path,
    way: str,
    verify: str,
) -> None:
    engine = engine_of(server, models[0])
    sealed = trainer.seal(weights[2])
    agent.write(sealed.slot, str(tmp_path), {}, fsync=False).result(LIMIT)
    trainer.synchronizer.commit(sealed.version, str(tmp_path)).result(LIMIT)
    report = loader_of(engine, trainer, way, CheckpointMode(durable=False), verify).load(None)
    assert report.digest == (reference_digest(weights[2], "BF16") if verify == "full" else None)
    assert_made_by(models[2], generated(engine))
    engine.close()


@pytest.mark.all
@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_somebody_else_gave_weights_is_never_sampled_from(
    server: RealServer, models: list[Path], weights: list[Weights], trainer: PretendTrainer, way: str
) -> None:
    engine = engine_of(server, models[0])
    loader = loader_of(engine, trainer, way)
    trainer.publish(weights[0])
    loader.load(None)
    HttpControl(engine._server).reload(models[1], str(loader.held))
    theirs = server.get("/weight_info")["weight_version"]
    with pytest.raises(EngineDeathError, match=f"{server.url} says that it holds {theirs}, but it was given"):
        generated(engine)
    with pytest.raises(EngineDeathError, match="another program has sent it weights"):
        loader.load(None)
    assert server.get("/weight_info")["weight_version"] == theirs
    engine.close()
    again = engine_of(server, models[0])
    loader_of(again, trainer, way).load(None)
    assert_made_by(models[0], generated(again))
    again.close()


@pytest.mark.all
def test_weights_that_come_while_samples_are_made_are_noticed(
    server: RealServer,
    models: list[Path],
    weights: list[Weights],
    trainer: PretendTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(server, models[0])
    trainer.publish(weights[0])
    loader_of(engine, trainer, "file").load(None)
    whole = engine._server.post_each

    def then_another(*asked: Any) -> object:
        made = whole(*asked)
        server.post("/update_weight_version", {"new_version": "theirs"})
        return made

    monkeypatch.setattr(engine._server, "post_each", then_another)
    with pytest.raises(EngineDeathError, match="says that it holds theirs"):
        generated(engine)
    engine.close()


@pytest.mark.all
def test_a_server_that_another_run_gives_weights_is_refused_until_that_ends(
    server: RealServer, models: list[Path]
) -> None:
    first = engine_of(server, models[0])
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} gives the vLLM server at .* its weights"):
        engine_of(server, models[0], url=f"http://localhost:{server.port}")
    first.close()
    engine_of(server, models[0]).close()


WRONG = {
    "shapes of a tensor": {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[3]]},
    "no version": {"version": 7, "giver": "nobody"},
    "a version of nobody": {"version": "0.1", "giver": None},
    "a text": "x",
    "a list": [],
}


@pytest.mark.all
@pytest.mark.parametrize("paused", [True, pytest.param(False, marks=pytest.mark.all)])
@pytest.mark.parametrize("info", WRONG.values(), ids=WRONG)
def test_an_update_that_is_wrong_is_refused_and_weights_and_label_stay(
    server: RealServer, models: list[Path], trainer: PretendTrainer, weights: list[Weights], info: object, paused: bool
) -> None:
    engine = engine_of(server, models[0])
    trainer.publish(weights[0])
    loader_of(engine, trainer, "workers").load(None)
    label = server.get("/weight_info")
    if paused:
        server.post("/pause", mode="wait")
    for path, body in (
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": info}),
        ("/finish_weight_update", {"weight_version": "theirs"}),
        ("/start_draft_weight_update", None),
        ("/init_weight_transfer_engine", {"init_info": {"path": "/nowhere", "key": "00"}}),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}),
    ):
        refused = path != "/start_weight_update"
        assert (httpx.post(server.url + path, json=body, timeout=60, trust_env=False).status_code >= 400) == refused
    if paused:
        server.post("/resume")
    assert server.get("/weight_info") == label
    assert_made_by(models[0], generated(engine))
    loader_of(engine, trainer, "workers").load(None)
    engine.close()


@pytest.mark.all
@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_fails_leaves_no_version_and_the_next_one_gets_in(
    server: RealServer,
    models: list[Path],
    weights: list[Weights],
    trainer: PretendTrainer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    way: str,
) -> None:
    engine = engine_of(server, models[0])
    loader = loader_of(engine, trainer, way)
    trainer.publish(weights[0])
    loader.load(None)
    with monkeypatch.context() as patch:
        if way == "workers":  # it says of another version that it has arrived
            whole = HttpControl.update
            patch.setattr(HttpControl, "update", lambda self, version, nbytes=0: whole(self, version and "0.999"))
        else:
            reload = HttpControl.reload
            patch.setattr(HttpControl, "reload", lambda self, folder, version, nbytes: reload(self, tmp_path, version))
        with pytest.raises(RunError, match=rf"{server.url} failed to (load|put) version"):
            loader.load(None)
    assert loader.held is None
    assert str(server.get("/weight_info")["weight_version"]).startswith("updating-")
    assert server.get("/is_paused") == {"is_paused": True}
    assert not files_left()
    loader.load(None)
    assert_made_by(models[0], generated(engine))
    engine.close()


@pytest.mark.all
def test_a_session_that_a_killed_explorer_left_open_is_ended(
    server: RealServer, models: list[Path], weights: list[Weights], trainer: PretendTrainer
) -> None:
    server.post("/pause", mode="wait")
    server.post("/start_weight_update")
    engine = engine_of(server, models[0])
    trainer.publish(weights[1])
    loader_of(engine, trainer, "workers").load(None)
    assert_made_by(models[1], generated(engine))
    engine.close()


@pytest.mark.all
def test_what_a_server_has_to_be_is_said(
    server: RealServer, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: Path = models[0], **changes: object) -> str:
        with pytest.raises(ConfigError) as caught:
            engine_of(server, model, **changes)
        return str(caught.value)

    at = f"explorer.url: the vLLM server at {server.url}"
    assert refused(dtype="fp32").startswith(f"{at} holds its weights in torch.bfloat16, but explorer.dtype=fp32")
    assert refused(temperature=0.7) == (
        f"{at} tells raw_logprobs; with explorer.temperature=0.7 start it with --logprobs-mode processed_logprobs"
    )
    assert refused(prompt_length=123).startswith(f"{at} has room for 128 tokens")
    facts = ServerClient.facts
    for changes, why in (
        ({"quantization": "fp8"}, "holds its weights in fp8; start it without --quantization"),
        ({"backend": None, "load_format": "dummy"}, "was started with --load-format dummy, so it cannot reload"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ServerClient, "facts", lambda of, changes=changes: facts(of)._replace(**changes))
            assert refused().startswith(f"{at} {why}")
    other = make_model(ARCHITECTURE | {"vocab_size": 40, "num_hidden_layers": 1}, 0, tmp_path / "other")
    told = refused(other)
    assert told.startswith(f"{at} serves {models[3]}, which is another model than model.path={other}")
    assert "(vocab_size is 32 there and 40 here)" in told


@pytest.mark.all
def test_vllm_need_not_be_installed_where_the_explorer_is(server: RealServer, models: list[Path]) -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "from trinity_sync.explorer.vllm_server import VLLMServerEngine\n"
        "VLLMServerEngine(sys.argv[1], url=sys.argv[2], dtype='bf16', temperature=1.0, batch_size=8,\n"
        "                 response_length=6, seed=0, timeout_s=60.0, start_timeout_s=60.0)"
    )
    subprocess.run([sys.executable, "-c", program, str(models[0]), server.url], check=True, timeout=LIMIT)


def test_nothing_at_the_url_is_waited_for_and_said(models: list[Path], tmp_path: Path) -> None:
    nobody = RealServer(models[0], tmp_path / "log")
    with pytest.raises(WaitTimeout, match=rf"{nobody.url} did not come up \(.*refused.*\) within 0.9 s"):
        engine_of(nobody, models[0], start_timeout_s=1.0)


class _Stranger(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)


@contextmanager
def somebody() -> Iterator[str]:
    """Another server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_another_server_at_the_url_is_refused(models: list[Path], tmp_path: Path) -> None:
    server = RealServer(models[0], tmp_path / "log")
    with somebody() as url:
        server.url = url.replace("http://", "http://user:secret@")
        with pytest.raises(ConfigError, match="is not a vLLM server") as refused:
            engine_of(server, models[0])
    assert url.removeprefix("http://") in str(refused.value)
    assert "secret" not in str(refused.value)


# ---- servers that die


@pytest.mark.all
def test_a_server_without_dev_mode_is_refused(models: list[Path], tmp_path: Path) -> None:
    with (
        serving(models[0], tmp_path / "log", dev=False) as server,
        pytest.raises(ConfigError, match=f"{server.url} does not accept weights.*VLLM_SERVER_DEV_MODE=1"),
    ):
        engine_of(server, models[0])


@pytest.mark.all
@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_was_started_again_is_noticed(
    models: list[Path], weights: list[Weights], trainer: PretendTrainer, tmp_path: Path, way: str
) -> None:
    with serving(models[3], tmp_path / "log", *PLUG_IN) as server:
        engine = engine_of(server, models[0])
        loader = loader_of(engine, trainer, way)
        trainer.publish(weights[0])
        loader.load(None)
        server.kill()
        with pytest.raises(EngineDeathError, match=rf"{server.url} disconnected \(.*refused.*\)"):
            generated(engine)
        server.start(wait=False)
        engine._lock.close()  # as the end of its process does; an explorer that lost its engine ends
        again = engine_of(server, models[0], start_timeout_s=240.0)
        with pytest.raises(
            EngineDeathError, match=r"says that it holds default, but it was given .*: it was restarted"
        ):
            generated(engine)
        with pytest.raises(EngineDeathError):
            loader.load(None)
        loader_of(again, trainer, way).load(None)
        assert_made_by(models[0], generated(again))
        again.close()


@pytest.mark.all
@pytest.mark.parametrize("asked", ["to generate", "for its version"])
def test_an_engine_core_that_dies_while_it_is_asked_is_told_as_a_death(
    models: list[Path],
    weights: list[Weights],
    trainer: PretendTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
) -> None:
    with serving(models[3], tmp_path / "log", *PLUG_IN) as server:
        engine = engine_of(server, models[0], timeout_s=1000.0)
        trainer.publish(weights[0])
        loader_of(engine, trainer, "file").load(None)
        if asked == "to generate":
            monkeypatch.setattr(engine._control, "check", lambda: None)
        core = server.core()
        os.kill(core.pid, signal.SIGSTOP)  # what is asked of it is under way until it is killed
        killer = threading.Timer(2.0, core.kill)
        killer.start()
        with pytest.raises(EngineDeathError, match=server.url):
            generated(engine)
        killer.join()
