"""Storage places: a path, or a URL of a file system that fsspec knows, judged by the name alone."""

from __future__ import annotations

import inspect
from pathlib import Path

from trinity_sync.host.masking import shown

#: The extra of this package with the dependencies of a protocol.
_EXTRAS = {"s3": "s3", "s3a": "s3", "sftp": "sftp", "ssh": "sftp", "gs": "gcs", "gcs": "gcs"}

_USUAL = "file, s3, gs, az, sftp, hdfs"


def place_problem(place: str) -> str | None:
    """Return what is wrong with the name of a place (a path or a URL), for the user; None: nothing is."""
    import fsspec
    from fsspec.registry import known_implementations

    if not place.strip():
        return "is empty; name a folder or a URL, or null for none"
    if place.startswith("~"):
        return f"is {place}, but '~' is not expanded here; write the whole path"
    if "::" in place:
        return f"is {shown(place)}, a chain of file systems; name the one that keeps the files"
    protocol, separator, rest = place.partition("://")
    if not separator:
        return None
    if protocol == "memory":
        return f"is {place}, which ends with the process that writes it; name a place that stays"
    if protocol in ("file", "local") and not rest.startswith("/"):
        return f"is {place}; a {protocol}:// URL needs an absolute path, such as {protocol}:///mnt/checkpoints"
    if protocol not in fsspec.available_protocols():
        return f"is {shown(place)}, but fsspec knows no {protocol}://; it knows {_USUAL} and others"
    try:
        found = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        if protocol in _EXTRAS:
            advice = f"install it with: pip install 'trinity-sync[{_EXTRAS[protocol]}]'"
        else:
            advice = str(known_implementations.get(protocol, {}).get("err") or error)
        return f"is {shown(place)}, but the package that speaks {protocol}:// is not installed; {advice}"
    if any("target_protocol" in inspect.signature(kind.__init__).parameters for kind in found.__mro__):
        return f"is {shown(place)}, a file system over another one; name the one that keeps the files"
    return None


def absolute(place: str) -> str:
    """Return a path as an absolute one; a URL as it is."""
    return place if "://" in place else str(Path(place).absolute())


def local_folder(place: str) -> Path | None:
    """Return the folder of a place on this machine; None: it is elsewhere."""
    protocol, separator, rest = place.partition("://")
    if not separator:
        return Path(place)
    return Path(rest) if protocol in ("file", "local") else None


def are_same(one: str, other: str) -> bool:
    """Return whether two names are of one place, by the names and, on this machine, by links."""
    folders = local_folder(one), local_folder(other)
    if folders[0] is not None and folders[1] is not None:
        return folders[0].resolve() == folders[1].resolve()
    split = (place.partition("://") for place in (one, other))
    return len({(_EXTRAS.get(protocol, protocol), rest.rstrip("/")) for protocol, _, rest in split}) == 1
