"""A store on S3 and a follower of it, against moto's server; where s3fs and moto are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.stores import PretendRun
from trinity_sync.checkpoint.mirror.copies import Storage
from trinity_sync.checkpoint.mirror.follower import VersionFollower
from trinity_sync.protocol.versions import Version

pytestmark = pytest.mark.all


def test_a_follower_of_a_bucket_has_the_newest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        place = "s3://bucket/run"
        Storage(place)._fs.mkdir("bucket")
        PretendRun(tmp_path / "run", place).publish_all(1, 2)
        follower = VersionFollower(place, tmp_path / "into", print)
        follower.open()
        assert follower.update()
        assert follower.version == Version(0, 2)
        assert not follower.update()
    finally:
        server.stop()
