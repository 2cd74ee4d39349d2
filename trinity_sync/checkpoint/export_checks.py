"""Whether what goes into an export is what the checkpoint's manifest says: its weights, an adapter's base, draft heads.

Base and draft heads lie in the model's folder, which the manifest names. Somebody else may have written that, and the
folder may have changed since: only what has the manifest's digest is taken from it, whatever the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trinity_sync.checkpoint.manifest_fields import Base
from trinity_sync.checkpoint.reading import Weights, WeightsError, open_weights
from trinity_sync.checkpoint.reading.hugging_face import Stored, is_hugging_face, open_hugging_face
from trinity_sync.checkpoint.reading.saved_form import made_of
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.protocol.decisions import LeftOut
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.shards import listed
from trinity_sync.weights.tensors import digest_entry, saved_list, tower
from trinity_sync.weights.wire import Wire, kept_names
from trinity_sync.weights.wire_cast import kept_by_class

_WIRE_DTYPES = ("BF16", "F32", "F16")
"""Dtypes that the digest in a manifest may be of, the usual one first."""


def wires_of(weights: Weights) -> list[Wire]:
    """The dtypes that the weights' version digest may be of: those that the manifest says, else the usual ones first,
    with what the model's class keeps in fp32.

    Raises:
        WeightsError: no model can be made of its config.
    """
    told = weights.manifest.wire if weights.manifest is not None else None
    return [told] if told is not None else _usual(weights)


def _usual(weights: Weights) -> list[Wire]:
    plain = [Wire(dtype) for dtype in _WIRE_DTYPES]
    model = made_of(weights.config) if weights.config is not None and not weights.adapter else None
    kept = kept_names(kept_by_class(model, _WIRE_DTYPES[0]), list(weights)) if model is not None else frozenset[str]()
    return [Wire(_WIRE_DTYPES[0], kept), *plain] if kept else plain


def check_digest(weights: Weights, wire_digest: str) -> str | None:
    """Check that weights have the manifest's digest, in the dtypes that it says or else in one of the wire dtypes.

    Args:
        weights: of a checkpoint.
        wire_digest: their digest by the first of `wires_of`.

    Returns:
        The manifest's digest; None where there is none.

    Raises:
        RunError: they have another one.
    """
    expected = weights.manifest.digest if weights.manifest is not None else None
    if expected is None or expected == wire_digest:
        return expected
    wires = wires_of(weights)
    # Manifests of old do not say in which dtypes; others than the usual ones cost another pass over the weights.
    if any(weights.digest(other) == expected for other in wires[1:]):
        return expected
    raise RunError(
        f"the weights in {weights.folder} have the digest {wire_digest} in {wires[0].dtype}, but its manifest "
        f"says {expected}: they are not what was committed, and nothing was exported; `trinity-sync ckpt verify` tells "
        "which file was changed"
    )


def open_base(adapter: Weights, given: Path | None) -> Weights:
    """Open the base of an adapter, without draft heads that its manifest knows of; that tells it apart from any other
    model. Of an adapter without such a manifest, as verl's, all that is in the base's folder is opened.

    Args:
        adapter: of a checkpoint.
        given: the folder that the user named; None: the manifest's.

    Raises:
        ConfigError: it is not there.
        WeightsError: nothing tells the base apart, and the folder lacks tensors of its model.
        RunError: the adapter or the base is not what was committed, and what is in its place.
    """
    check_digest(adapter, adapter.digest(wires_of(adapter)[0]))
    manifest = adapter.manifest
    known = manifest.base if manifest is not None else None
    place = given or (Path(known.path) if known is not None else None)
    if place is None or not place.is_dir():
        what = "nothing tells which it is" if place is None else f"{place} is no folder"
        digest = "" if known is None else f" with the digest {known.digest}"
        raise ConfigError(
            f"{adapter.folder} is to be merged into its base{digest}, but {what}; name it with --base DIR"
        )
    opened = open_weights(place)
    if known is None:
        return _whole(opened)
    told = manifest.left_out if manifest is not None else None
    opened = _saved(opened).without(told["names"] if told is not None else ())
    _check_base(adapter, opened, known)
    return opened


def _check_base(adapter: Weights, opened: Weights, known: Base) -> None:
    wires = [known.wire] if known.wire is not None else _usual(opened)
    found = opened.digest(wires[0])
    if found != known.digest and all(opened.digest(other) != known.digest for other in wires[1:]):
        raise RunError(
            f"{adapter.folder} was trained on a base with the digest {known.digest}, but {opened.folder} has {found}; "
            "nothing was exported: name the base that it was trained on with --base DIR"
        )


def _saved(weights: Weights) -> Weights:
    """Leave out what `save_pretrained` would not write of the model, such as the second name of tied tensors."""
    model = made_of(weights.config) if weights.config is not None else None
    return weights if model is None else weights.without(set(weights) - saved_list(model).keys())


def _whole(weights: Weights) -> Weights:
    """Leave out second names of tied tensors, and nothing else: draft heads stay."""
    model = made_of(weights.config) if weights.config is not None else None
    if model is None:
        return weights
    saved = saved_list(model).keys()
    absent = sorted(saved - set(weights))
    if absent:
        raise WeightsError(
            f"{weights.folder} is no whole {type(model).__name__}, which its config.json describes: it has no "
            f"{listed(absent)}; save the model with save_pretrained of this transformers, and name that folder"
        )
    return weights.without(model.state_dict().keys() - saved)


def digest_left_out(tensors: Mapping[str, Stored], names: Iterable[str]) -> str:
    """Compute the digest of tensors of a model's folder that are not trained, each as it is stored; reads them.

    Args:
        tensors: of the folder.
        names: those to digest.
    """
    return version_digest([digest_entry(name, tensors[name].read(), None) for name in names])


def tower_in(weights: Weights) -> list[str]:
    """Name those of some weights that are a vision tower's, which is in no version.

    Raises:
        WeightsError: no model can be made of their config.
    """
    model = made_of(weights.config) if weights.config is not None else None
    if model is None:
        return []
    still, saved = tower(model), saved_list(model)
    return [name for name in weights if name in saved and saved[name].held in still]


def open_left_out(told: LeftOut | None, given: Path | None) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """Open the tensors that the model's folder had and the trained model has not, such as draft heads. Reads them.

    Args:
        told: what the manifest says of them; None: there are none.
        given: the folder that the user named; None: the manifest's.

    Returns:
        The tensors; and the names of those that are not there any more, or not as they were. These are all or none: one
        digest is of all of them.

    Raises:
        WeightsError: a file of the folder is damaged.
    """
    if told is None:
        return {}, ()
    folder, names = given or Path(told["path"]), tuple(told["names"])
    there = open_hugging_face(folder) if folder.is_dir() and is_hugging_face(folder) else {}
    if not there.keys() >= set(names) or digest_left_out(there, names) != told["digest"]:
        return {}, names
    return {name: there[name] for name in names}, ()
