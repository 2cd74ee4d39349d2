"""The folders of a chain, its small disk, and what is done to files."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.host.durable import digest_file

DISK_MB = 96

DISK, SECOND_PLACE = "TRINITY_KILLS_DISK", "TRINITY_KILLS_MIRROR"
"""Environment variables for `Setup.by_environment`."""

_ELSEWHERE = "elsewhere.txt"
"""Names the folders of a chain that do not lie in its own, as long as they are there."""


@dataclass(frozen=True)
class Places:
    """Where a chain's runs put things.

    Attributes:
        run: the run's folder.
        checkpoints: `checkpoint.dir`.
        mirror: `checkpoint.mirror`, where the run has one.
        shm: `sync.shm_dir`.
        ray: `cluster.temp_dir`, short because paths of sockets are.
        shared: the last two belong to several chains; else all places are the chain's own.
    """

    home: Path
    run: Path
    checkpoints: Path
    shm: Path
    ray: Path
    small_disk: bool
    shared: bool = False

    @property
    def mirror(self) -> Path:
        return self.home / "mirror"

    @classmethod
    def make(cls, home: Path, *, small_disk: bool, machine: tuple[Path, Path] | None = None) -> Places:
        """Fresh ones.

        Args:
            machine: `shm` and `ray` of several chains; None: they are made for this chain.

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
        shm, ray = machine or make_machine(home)
        return cls(home, run, checkpoints, shm, ray, small_disk, shared=machine is not None)

    def overrides(self, *, mirrored: bool = False, by_environment: bool = False) -> list[str]:
        """For `launch.py`; with references to what `environment` gives where `by_environment`."""
        disk, mirror = (f"${{oc.env:{name}}}" for name in (DISK, SECOND_PLACE))
        return [
            f"hydra.run.dir={self.run}",
            f"checkpoint.dir={disk if by_environment else self.checkpoints}",
            *([f"checkpoint.mirror={mirror if by_environment else self.mirror}"] if mirrored else []),
            f"sync.shm_dir={self.shm}",
            f"cluster.temp_dir={self.ray}",
        ]

    def environment(self) -> dict[str, str]:
        """Environment variables of the run's first start."""
        return {DISK: str(self.checkpoints), SECOND_PLACE: str(self.mirror)}

    def left_in_memory(self, drivers: Collection[int] = ()) -> list[str]:
        """Slots and Ray folders that are still there; the empty homes that runs share do not count.

        Args:
            drivers: process ids of the chain's drivers: a name in a shared place has that of its driver.
        """
        found = [path for path in (*self.shm.rglob("*"), *self.ray.rglob("*")) if path.name != ".lock"]
        if self.shared:
            words = {str(pid) for pid in drivers}
            found = [path for path in found if any(words & set(re.split(r"[-_]", part)) for part in path.parts)]
        return [str(path) for path in found if not path.is_dir()][:5]

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
        machine = () if self.shared else (self.shm, self.ray)
        for folder in (*machine, *([self.home] if remove else [])):
            shutil.rmtree(folder, ignore_errors=True)
        (self.home / _ELSEWHERE).unlink(missing_ok=True)


def make_machine(home: Path) -> tuple[Path, Path]:
    """Make fresh folders for `Places.shm` and `Places.ray`, and note them in `home` for `remove_orphans`."""
    shm, ray = (Path(tempfile.mkdtemp(prefix="k", dir=root)) for root in ("/dev/shm", "/tmp"))
    for folder in (shm, ray):
        folder.chmod(0o1777)  # as `/dev/shm` and `/tmp`
    home.mkdir(parents=True, exist_ok=True)
    (home / _ELSEWHERE).write_text(f"{shm}\n{ray}\n")
    return shm, ray


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


def lose(folder: Path) -> None:
    """Delete everything in a folder, and the folder where nothing is mounted there."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not folder.is_mount():
        folder.rmdir()


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, with a digest of its bytes; locks do not count."""
    return {
        str(path.relative_to(folder)): digest_file(path)[1]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }
