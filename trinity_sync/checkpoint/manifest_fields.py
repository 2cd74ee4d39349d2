"""What a manifest says of model folders: the base of an adapter, tensors that are not trained, and the reference."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_sync.protocol.decisions import Compared, LeftOut
from trinity_sync.weights.wire import Wire

_MOST = 2**63 - 1
_LAST_S = 253402300799
"""The end of the year 9999, in Unix seconds."""

BASE_NOTE = "trinity_base"
"""Key in the header of an exported adapter's file, where what the manifest says of its base stands as JSON."""


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter belongs to, which its checkpoint does not hold.

    Args:
        digest: version digest of its weights in wire dtype, hex.
        path: `model.path` of the run: a folder's absolute path, or a hub id as given.
        what: what is trained on it: ``lora``.
        wire: the dtypes of which `digest` is; None where it is not known.
        adapter: the adapter's ``adapter_config.json``, which weights-only checkpoints have no file of; None where it is
            not known.
    """

    digest: str
    path: str
    what: str = "lora"
    wire: Wire | None = None
    adapter: Mapping[str, object] | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Base:
        """Make it from what a manifest holds.

        Raises:
            ValueError, KeyError, TypeError: it is not as it may be.
        """
        _check_texts(body, "its base", ("digest", "path", "what"))
        if body["what"] != "lora":
            raise ValueError(f"what is on its base is {body['what']!r}")
        wire = Wire.from_json(body["wire"]) if "wire" in body else None
        adapter = body.get("adapter")
        if not (adapter is None or isinstance(adapter, dict)):
            raise ValueError(f"the adapter on its base is {adapter!r}")
        return cls(body["digest"], body["path"], body["what"], wire, adapter)

    def to_json(self) -> dict[str, object]:
        """Return the object in the manifest."""
        body: dict[str, object] = {"digest": self.digest, "path": self.path, "what": self.what}
        if self.wire is not None:
            body["wire"] = self.wire.to_json()
        return body if self.adapter is None else body | {"adapter": dict(self.adapter)}


def left_out_of(body: Mapping[str, Any]) -> LeftOut:
    """Read what a manifest says of tensors that an export takes from the model's folder.

    Raises:
        ValueError, KeyError, TypeError: it is not as it may be.
    """
    _check_texts(body, "what its export takes from elsewhere", ("path", "digest"))
    names, tower = body["names"], body.get("tower", [])
    for some in (names, tower):
        if not isinstance(some, list) or not all(isinstance(name, str) for name in some):
            raise ValueError(f"the names of what its export takes from elsewhere are {some!r}")
    return {"path": body["path"], "names": names, "digest": body["digest"], "tower": tower}


def reference_of(body: Mapping[str, Any]) -> Compared:
    """Read what a manifest says of the reference that the policy was held near to; errors as of `left_out_of`."""
    _check_texts(body, "its reference", ("path", "digest"))
    return {"path": body["path"], "digest": body["digest"]}


def check_values(body: Mapping[str, Any]) -> None:
    """Check that what a manifest says of a checkpoint and its files can be: whoever wrote it may mean harm.

    Raises:
        ValueError, KeyError, TypeError: it cannot.
    """
    files = body["files"]
    _check_texts(body, "this checkpoint", ("backend",))
    odd = [(name, body[name]) for name in ("digest", "config_digest") if not isinstance(body[name], str | None)]
    odd += [(name, body[name]) for name in ("step", "attempt", "world_size") if not _is_count(body[name])]
    odd += [("created", body["created"])] if not _is_number(body["created"], _LAST_S) else []
    odd += [(f"metric {name}", one) for name, one in body["metrics"].items() if not (one is None or _is_number(one))]
    odd += [("path of a file", file["path"]) for file in files if not _is_inside(file["path"])]
    odd += [(f"size of {file['path']}", file["bytes"]) for file in files if not _is_count(file["bytes"])]
    odd += [(f"digest of {file['path']}", one) for file in files if not isinstance(one := file["xxh3_128"], str)]
    if odd:
        raise ValueError(f"its {odd[0][0]} is {odd[0][1]!r:.100}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: object, most: float = sys.float_info.max) -> bool:
    return type(value) in (int, float) and 0 <= abs(value) <= most  # type: ignore[arg-type]


def _is_inside(path: object) -> bool:
    """Whether a path leads to a file in the folder that it is relative to."""
    return isinstance(path, str) and not (path.startswith("/") or "\0" in path or {"", ".."} & set(path.split("/")))


def _check_texts(body: Mapping[str, Any], what: str, keys: Iterable[str]) -> None:
    odd = next((key for key in keys if not isinstance(body[key], str)), None)
    if odd is not None:
        raise ValueError(f"the {odd} of {what} is {body[odd]!r}")
