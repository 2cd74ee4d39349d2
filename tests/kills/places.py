"""The folders of a chain, its small disk, and what is done to files."""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

DISK_MB = 96

_ELSEWHERE = "elsewhere.txt"
"""Names the folders of a chain that do not lie in its own, as long as they are there."""


@dataclass(frozen=True)
class Places:
    """Where a chain's runs put things; each is its own, so that whatever is in them was left by this chain.

    Attributes:
        run: the run's folder.
        checkpoints: `checkpoint.dir`.
        shm: `sync.shm_dir`.
        ray: `cluster.temp_dir`, short because paths of sockets are.
    """

    home: Path
    run: Path
    checkpoints: Path
    shm: Path
    ray: Path
    small_disk: bool

    @classmethod
    def make(cls, home: Path, *, small_disk: bool) -> Places:
        """Fresh ones.

        Raises:
            OSError: a small file system cannot be mounted (not root).
        """
        home.mkdir(parents=True)
        run = home / "run"
        checkpoints = home / "disk" if small_disk else run / "checkpoints"
        if small_disk:
            checkpoints.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "trinity-kills", str(checkpoints)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(errno.EPERM, done.stderr.strip(), str(checkpoints))
        shm, ray = (Path(tempfile.mkdtemp(prefix="k", dir=root)) for root in ("/dev/shm", "/tmp"))
        (home / _ELSEWHERE).write_text(f"{shm}\n{ray}\n")
        return cls(home, run, checkpoints, shm, ray, small_disk)

    def overrides(self) -> list[str]:
        """For `launch.py`."""
        return [
            f"hydra.run.dir={self.run}",
            f"checkpoint.dir={self.checkpoints}",
            f"sync.shm_dir={self.shm}",
            f"cluster.temp_dir={self.ray}",
        ]

    def left_in_memory(self) -> list[str]:
        """Slots and Ray folders that are still there; the empty homes that runs share do not count."""
        found = [*self.shm.rglob("*"), *self.ray.rglob("*")]
        return [str(path) for path in found if not path.is_dir() and path.name != ".lock"][:5]

    def fill(self) -> None:
        """Leave no byte free on the small disk."""
        with contextlib.suppress(OSError), open(self._filler, "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.checkpoints / ".filler"

    def keep(self) -> None:
        """Bring the checkpoints from the small disk into the folder that is kept."""
        if self.small_disk and self.checkpoints.is_mount():
            self.free()
            shutil.copytree(self.checkpoints, self.home / "checkpoints", dirs_exist_ok=True, symlinks=True)

    def close(self, *, remove: bool) -> None:
        """Unmount and remove; the run's folder stays unless `remove`."""
        if self.small_disk and self.checkpoints.is_mount():
            subprocess.run(["umount", "-l", str(self.checkpoints)], check=False, capture_output=True)
        for folder in (self.shm, self.ray, *([self.home] if remove else [])):
            shutil.rmtree(folder, ignore_errors=True)
        (self.home / _ELSEWHERE).unlink(missing_ok=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a small disk."""
    try:
        Places.make(folder, small_disk=True).close(remove=True)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def remove_orphans(folder: Path) -> None:
    """Unmount and remove what a campaign that was killed left, all but the chains' folders below `folder`."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, place = line.split()[:2]
        if device == "trinity-kills" and Path(place).is_relative_to(folder):
            subprocess.run(["umount", "-l", place], check=False, capture_output=True)
    for note in folder.glob(f"*/{_ELSEWHERE}"):
        for place in note.read_text().splitlines():
            shutil.rmtree(place, ignore_errors=True)
        note.unlink()


def damage(path: Path, how: str, draw: float) -> None:
    """Do something to a file that an honest program would not."""
    if how == "delete":
        path.unlink()
        return
    size = path.stat().st_size
    # A folder of links may share the file with another one: what a disk damages is one copy.
    copy = path.with_name(path.name + ".copy")
    shutil.copyfile(path, copy)
    with open(copy, "r+b") as file:
        if how == "flip":
            at = min(int(draw * size), size - 1)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x40]))
        else:
            file.truncate(size // 2 if how == "cut" else 0)
    copy.replace(path)
