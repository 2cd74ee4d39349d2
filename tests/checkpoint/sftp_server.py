"""A real SFTP server for tests: ``python sftp_server.py FOLDER PORT [HOLD_AFTER_BYTES]``, without a login.

Prints ``listening PORT`` when it is up. With a third argument it takes that many bytes of files, prints ``holding``,
and answers no write any more, so that a test can kill it in the middle of an upload.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import asyncssh

folder, port = sys.argv[1], int(sys.argv[2])
hold_after = int(sys.argv[3]) if len(sys.argv) > 3 else None
taken = 0


class Login(asyncssh.SSHServer):
    """Everybody may come in."""

    def begin_auth(self, username: str) -> bool:
        return False


class Files(asyncssh.SFTPServer):
    """The folder, as the root."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel, chroot=folder.encode())

    async def write(self, file_obj: Any, offset: int, data: bytes) -> int:
        global taken
        if hold_after is not None and taken + len(data) > hold_after:
            print("holding", flush=True)
            await asyncio.Event().wait()
        taken += len(data)
        return super().write(file_obj, offset, data)


async def main() -> None:
    server = await asyncssh.listen(
        "127.0.0.1",
        port,
        server_factory=Login,
        sftp_factory=Files,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
    )
    print(f"listening {server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
