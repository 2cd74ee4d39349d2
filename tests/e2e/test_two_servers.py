"""`explorer=vllm_server` with two servers that ask for a key; the servers are stand-ins."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.e2e.runs import Run, launch, resume, start
from tests.explorer.helpers import ARCHITECTURE
from tests.vllm.stand_in_server import StandInServer, stand_in_server
from trinity_sync.models.architecture import make_model

KEY = "sk-8c1f-of-the-servers-77"
VARIABLE = "KEY_OF_MY_SERVERS"


class Kept(NamedTuple):
    """A finished run, its servers, and where the key was found while it ran."""

    run: Run
    servers: list[StandInServer]
    found: list[str]


def files_with_the_key(folder: Path) -> Iterator[str]:
    for file in folder.rglob("*"):
        if file.is_file() and KEY.encode() in file.read_bytes():
            yield str(file)


def arguments_with_the_key() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        if any(KEY in argument for argument in process.info["cmdline"] or ()):
            yield str(process.info["cmdline"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StandInServer]]:
    model = make_model(ARCHITECTURE, 7, tmp_path_factory.mktemp("model") / "policy")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, KEY)
        yield [stack.enter_context(stand_in_server(model, KEY)) for _ in range(2)]


def overrides(servers: list[StandInServer], *more: str) -> list[str]:
    urls = f"explorer.url=[{','.join(server.url for server in servers)}]"
    chosen = ["explorer=vllm_server", f"explorer.replicas={len(servers)}", urls, f"explorer.key_env={VARIABLE}"]
    return [*chosen, f"model.path={servers[0].folder}", *more]


@pytest.fixture(scope="module")
def kept(servers: list[StandInServer], tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("two") / "run"
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as rays:  # Ray takes a short path only
        started = start(folder, *overrides(servers, f"cluster.temp_dir={rays}", "tracker=tensorboard"))
        started.wait_for_line("step 2/3")
        assert list(Path(rays).rglob("*.log")), "Ray's logs are looked at"
        found = [*arguments_with_the_key(), *files_with_the_key(Path(rays))]
        run = started.finish()
    assert run.code == 0, run.output
    return Kept(run, servers, found)


def test_each_explorer_uses_a_server_of_its_own(kept: Kept) -> None:
    assert [load["explorer"] for load in kept.run.events("load")] == ["explorer-0", "explorer-1"] * 4
    for server in kept.servers:
        assert len(server.loaded) == len(set(server.loaded)) == 4
        assert server.generated == 3 * 8, "half of the samples of each step"


def test_the_weights_of_all_are_those_of_the_trainer(kept: Kept) -> None:
    assert all(load["digest"] == kept.run.digests[load["version"]] for load in kept.run.events("load"))
    assert max(line["rollout_corr/log_prob_abs_diff"] for line in kept.run.lines("metrics.jsonl")) < 0.05


def test_every_request_has_the_key(kept: Kept) -> None:
    assert {sent for server in kept.servers for _, sent in server.heard} == {f"Bearer {KEY}"}


def test_the_key_is_in_no_file_no_output_and_no_argument(kept: Kept) -> None:
    assert list(kept.run.folder.rglob("*.html"))
    assert f"key_env: {VARIABLE}" in (kept.run.folder / ".hydra/config.yaml").read_text()
    assert not list(files_with_the_key(kept.run.folder))
    assert KEY not in kept.run.output
    assert not kept.found


@pytest.mark.all
def test_a_resume_uses_the_servers_and_the_key_again(kept: Kept) -> None:
    before = [len(server.loaded) for server in kept.servers]
    run = resume(kept.run.folder, "trainer.steps=4")
    assert run.code == 0, run.output
    assert all(len(server.loaded) > number for server, number in zip(kept.servers, before, strict=True))
    assert not list(files_with_the_key(run.folder))


@pytest.mark.all
def test_a_key_that_a_server_refuses_ends_the_start_and_is_not_shown(
    servers: list[StandInServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, wrong := KEY[::-1])
    run = launch(tmp_path / "run", *overrides(servers))
    assert run.code == 2, run.output
    assert f"refuses the key in the environment variable {VARIABLE}" in " ".join(run.output.split())
    assert wrong not in run.output + "".join(file.read_text() for file in (tmp_path / "run/logs").iterdir())
