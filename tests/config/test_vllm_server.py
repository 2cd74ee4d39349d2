"""What is refused of `explorer=vllm_server` before anything starts."""

from __future__ import annotations

from importlib import metadata

import pytest

from trinity_sync import config
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.actor import explorer_spec

SERVER = ["explorer=vllm_server", "explorer.url=http://127.0.0.1:8000"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.check(config.compose([*SERVER, *overrides]))
    return str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://node-3:80/", "https://[::1]:8000", "http://rollouts"])
def test_a_server_is_named_and_vllm_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    config.check(config.compose([*SERVER, f"explorer.url='{url}'"]))


def test_without_a_url_it_is_asked_for() -> None:
    assert refusal("explorer.url=null") == (
        "explorer.url is null; name the vLLM server, such as explorer.url=http://127.0.0.1:8000"
    )


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://host:1", "http://", "http://host:0"])
def test_what_is_no_address_is_refused(url: str) -> None:
    assert refusal(f"explorer.url='{url}'").startswith(f"explorer.url is {url}, which is not the address of a server")


@pytest.mark.parametrize("url", ["http://host:port", "http://host:70000"])
def test_what_is_no_port_is_refused(url: str) -> None:
    assert refusal(f"explorer.url='{url}'").startswith(f"explorer.url is {url}: Port")


@pytest.mark.parametrize("url", ["http://host/v1", "http://me@host", "http://host?a=1", "http://host#a"])
def test_more_than_an_address_is_refused(url: str) -> None:
    assert refusal(f"explorer.url='{url}'").startswith(f"explorer.url is {url}; name the server's address only")


def test_more_explorers_than_servers_are_refused() -> None:
    assert refusal("explorer.replicas=2") == "explorer.replicas is 2, but explorer.url names one server; set it to 1"


def test_modes_in_which_a_server_takes_no_part_are_refused() -> None:
    assert refusal("sync=nccl").startswith("sync is nccl, in whose rounds a server takes no part; choose sync=memory")
    for mode in ("memory", "checkpoint"):
        config.check(config.compose([*SERVER, f"sync={mode}"]))


@pytest.mark.parametrize("truncation", ["explorer.top_k=5", "explorer.top_p=0.9"])
def test_log_probs_that_vllm_does_not_tell_are_refused(truncation: str) -> None:
    assert refusal(truncation, "explorer.temperature=0.7").startswith("explorer.temperature is 0.7 together with top_k")
    config.check(config.compose([*SERVER, truncation]))


def test_deltas_are_refused() -> None:
    assert refusal("sync.encoding=delta").startswith("sync.encoding is delta, which explorer=vllm_server does not take")


def test_versions_are_full_by_default() -> None:
    assert explorer_spec(config.typed(config.compose(SERVER)), "model", "logs").sync["encoding"] == "full"
    deltas = explorer_spec(config.typed(config.compose([])), "model", "logs").sync["encoding"]
    assert deltas == "auto", "explorers that take deltas get them on other nodes"


def test_an_adapter_that_travels_alone_is_refused() -> None:
    assert "which explorer=vllm_server does not take" in refusal("model.lora.rank=4", "sync.what=adapter")
    config.check(config.compose([*SERVER, "model.lora.rank=4", "sync.what=merged"]))


def test_the_explorer_reserves_no_gpu_and_knows_how_long_it_is_waited_for() -> None:
    spec = explorer_spec(config.typed(config.compose([*SERVER, "explorer.timeout_s=7"])), "model", "logs")
    assert spec.processes == 0
    assert (spec.engine["timeout_s"], spec.engine["start_timeout_s"]) == (7.0, 300.0)
