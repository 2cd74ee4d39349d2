"""What is refused of `explorer=vllm_server` before anything starts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import metadata

import pytest

from trinity_sync import config
from trinity_sync.errors import ConfigError
from trinity_sync.explorer.actor import explorer_spec
from trinity_sync.host.masking import EnvironmentSecret, without_hidden
from trinity_sync.protocol.rounds import RoundMember

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


def test_more_servers_than_explorers_are_refused() -> None:
    assert refusal("explorer.url=[http://a:1,http://a:2]") == (
        "explorer.replicas is 1, but explorer.url names 2 servers, one for each explorer; set it to 2"
    )


def test_each_explorer_gets_the_server_at_its_place_in_the_list() -> None:
    cfg = config.compose([*SERVER, "explorer.replicas=2", "explorer.url=[http://a:1,http://b]"])
    config.check(cfg)
    spec = explorer_spec(config.typed(cfg), "model", "logs")
    urls = [spec.of(RoundMember.new(f"explorer-{index}")).engine["url"] for index in range(2)]
    assert urls == ["http://a:1", "http://b"]


@pytest.mark.parametrize(
    "urls",
    [
        "http://a,http://a:80/",
        "https://a:443,https://A",
        "http://localhost:1,http://127.0.0.1:1",
        "http://a,'http://[::1]',http://localhost",
    ],
)
def test_a_server_that_is_named_twice_is_refused(urls: str) -> None:
    number = urls.count(",") + 1
    told = refusal(f"explorer.url=[{urls}]", f"explorer.replicas={number}")
    assert told == f"explorer.url names {urls.rpartition(',')[2]} twice; each explorer needs a server of its own"


@pytest.mark.parametrize("wrong", ["[]", "[http://a,b]", "[http://a,null]", "8000"])
def test_a_list_in_which_one_is_no_address_is_refused(wrong: str) -> None:
    assert refusal(f"explorer.url={wrong}", "explorer.replicas=2").startswith("explorer.url is ")


def test_a_variable_that_is_not_set_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVERS_KEY", raising=False)
    assert refusal("explorer.key_env=SERVERS_KEY") == (
        "explorer.key_env is SERVERS_KEY, but the environment has no such variable; export the server's --api-key as "
        "SERVERS_KEY"
    )


def test_a_key_in_place_of_a_variable_is_refused_and_not_shown() -> None:
    told = refusal("explorer.key_env=sk-4711")
    assert told.startswith("explorer.key_env is not the name of a variable")
    assert "4711" not in told


@pytest.mark.parametrize("key", ["two words", "line\n", "schlüssel"])
def test_what_no_header_can_have_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SERVERS_KEY", key)
    told = refusal("explorer.key_env=SERVERS_KEY")
    assert told.startswith("explorer.key_env is SERVERS_KEY, whose value cannot be a key")
    assert key not in told


def test_the_explorer_gets_the_key_and_no_text_of_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", "sk-4711-0815")
    cfg = config.compose([*SERVER, "explorer.key_env=SERVERS_KEY"])
    config.check(cfg)
    spec = explorer_spec(config.typed(cfg), "model", "logs")
    key = spec.engine["key"]
    assert isinstance(key, EnvironmentSecret)
    assert key.text == "sk-4711-0815"
    assert "sk-4711" not in f"{spec} {key}"
    assert without_hidden("refused: Bearer sk-4711-0815") == "refused: Bearer ***"


def test_a_key_is_hidden_in_the_process_to_which_it_is_sent() -> None:
    program = (
        "import pickle, sys\n"
        "from trinity_sync.host.masking import without_hidden\n"
        "key = pickle.load(sys.stdin.buffer); print(without_hidden(f'of {key.text}'))"
    )
    sent = pickle.dumps(EnvironmentSecret("SERVERS_KEY", "sk-9f-of-nobody"))
    done = subprocess.run([sys.executable, "-c", program], input=sent, stdout=subprocess.PIPE, check=True, timeout=300)
    assert done.stdout == b"of ***\n"


def test_servers_and_key_are_no_settings_of_what_is_computed() -> None:
    one = config.compose([*SERVER, "explorer.key_env=A"])
    assert config.config_digest(one) == config.config_digest(config.compose([*SERVER, "explorer.url=[http://b]"]))


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
