"""The option files that come with this program, read as they stand: what they name may be named by any configuration,
and what they call themselves by none of the user's own, but for the names of engines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from omegaconf import OmegaConf

from trinity_sync.config.composition import conf_dir

TARGET = "_target_"
"""The key that names a class."""

LABELS = {"algorithm": "kind", "backend": "strategy", "explorer": "kind", "sync": "mode"}
"""Groups with one option at a time that names the class it configures, and the key by which that option calls itself:
what users, events and reports name it by.
"""

OF_ENGINES = ("backend",)
"""Of these, the groups whose label is a name of another program's, so that a class of the user's own may have it, too:
verl's of the engine, by which a checkpoint says who can load it.
"""

GROUPS = (*LABELS, "checkpoint", "retention")
"""All groups whose options name the class that they configure."""


@cache
def own_options(group: str) -> Mapping[str, Mapping[str, object]]:
    """Our options of a group by name, each with what stands in its file: nothing is merged or resolved."""
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return {file.stem: _content(OmegaConf.to_container(OmegaConf.load(file), resolve=False)) for file in files}


@cache
def own_targets() -> frozenset[str]:
    """The classes that our options name."""
    return frozenset(name for group in GROUPS for name in own_targets_of(group))


@cache
def own_targets_of(group: str) -> frozenset[str]:
    """The classes that our options of a group name; none where they name no class that they configure."""
    options = own_options(group).values() if group in GROUPS else ()
    return frozenset(name for option in options for name in _targets(option))


@cache
def own_labels(group: str) -> Mapping[str, str]:
    """What our options of a group call themselves, and the class that each names."""
    options = own_options(group).values()
    return {str(option[LABELS[group]]): str(option[TARGET]) for option in options}


def chosen_by_option(overrides: Sequence[str]) -> list[str]:
    """Overrides of a run, with those that name one of our classes by its label, as runs could once, put as the choice
    of its option: ``sync.mode=nccl`` as ``sync=nccl``. Where the run has chosen a class of the user's own they stay.
    """
    chosen = dict(text.partition("=")[::2] for text in overrides)
    own = {
        group
        for group in LABELS
        if f"{group}.{TARGET}" in chosen or chosen.get(group, "") not in ("", *own_options(group))
    }
    return [_choice(text, own) or text for text in overrides]


def _choice(override: str, own: Collection[str]) -> str | None:
    key, _, value = override.partition("=")
    group, _, label = key.partition(".")
    if group in own or LABELS.get(group) != label:
        return None
    named = [name for name, option in own_options(group).items() if option[label] == value]
    # Where options share a class, the label is a setting of it.
    classes = list(own_labels(group).values())
    return f"{group}={named[0]}" if named and classes.count(own_labels(group)[value]) == 1 else None


def _content(value: object) -> dict[str, object]:
    return {str(key): inner for key, inner in value.items()} if isinstance(value, dict) else {}


def _targets(value: object) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == TARGET and isinstance(inner, str):
            yield inner
        else:
            yield from _targets(inner)
