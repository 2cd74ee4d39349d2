"""`explorer=vllm_server` with a server outside the Ray cluster: a network namespace is its host, and it sees neither
the shared memory nor the temporary folder of the explorer.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import launch
from tests.e2e.test_vllm_server import KEY, assert_right, overrides
from tests.explorer.helpers import ARCHITECTURE
from tests.vllm.servers import PLUG_IN, RealServer
from trinity_sync.models.architecture import make_model

HERE, THERE = "10.98.7.1", "10.98.7.2"
APART = 'mount -t tmpfs none /dev/shm && mount -t tmpfs none "$0" && exec "$@"'

pytestmark = pytest.mark.all


def made(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"trinity-{os.getpid()}"
    here = f"ts{secrets.token_hex(4)}"
    if not made("ip", "netns", "add", name):
        pytest.skip("network namespaces need root and `ip`")
    within = ("ip", "-n", name)
    try:
        assert made("ip", "link", "add", here, "type", "veth", "peer", "name", "there", "netns", name)
        assert made("ip", "addr", "add", f"{HERE}/30", "dev", here)
        assert made("ip", "link", "set", here, "up")
        assert made(*within, "addr", "add", f"{THERE}/30", "dev", "there")
        assert made(*within, "link", "set", "there", "up")
        assert made(*within, "link", "set", "lo", "up")
        yield name
    finally:
        made("ip", "netns", "del", name)


@pytest.fixture(scope="module")
def server(namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("server")
    model = make_model(ARCHITECTURE, 7, folder / "policy")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary, pytest.MonkeyPatch.context() as patch:
        apart = ("unshare", "-m", "--propagation", "private", "sh", "-c", APART, temporary)
        before = ("ip", "netns", "exec", namespace, *apart)
        made_server = RealServer(model, folder / "server.log", *PLUG_IN, "--api-key", KEY, before=before, host=THERE)
        patch.setenv("TMPDIR", temporary)  # of the run
        patch.setenv("SERVERS_KEY", KEY)
        made_server.start()
        try:
            yield made_server
        finally:
            made_server.close()


@pytest.mark.parametrize("mode", ["memory", "checkpoint"])
def test_a_run_publishes_to_it_with_equal_digests(tmp_path: Path, server: RealServer, mode: str) -> None:
    run = launch(tmp_path / "run", *overrides(server, f"sync={mode}"))
    assert_right(run, mode)
    assert not run.events("fault")
