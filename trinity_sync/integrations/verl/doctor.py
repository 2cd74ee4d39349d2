"""`trinity-sync verl`: what our plug-in would do in a verl program with this configuration. Loads neither verl
nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trinity_sync.errors import ConfigError
from trinity_sync.integrations.verl.vendor import CALLBACK, PLUGIN, TESTED, VENDOR, is_tested

MODULES, ENGINES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_ENGINE_VENDOR", "VERL_USE_EXTERNAL_PLUGINS"

_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_WHOLE = ("model", "optimizer", "extra")

Get = Callable[[str], object]
"""Returns the value of a key of verl's configuration; None: missing, or null."""


@dataclass(frozen=True)
class PackageFinding:
    """One finding."""

    # ``ours``: this would be ours; ``verl``: it stays verl's, or differs from what is expected; ``stops``: it prevents
    # the plug-in from working.
    state: Literal["ours", "verl", "stops"]
    subject: str  # the key, or the topic
    text: str  # a sentence
    add: Sequence[str] = ()  # lines that fix it, for a shell or as overrides


@dataclass(frozen=True)
class _Role:
    name: str
    engine: str  # prefix of the keys of strategy and Megatron's settings
    megatron: str
    checkpoint: str
    model: str


def findings(
    get: Get, environment: Mapping[str, str], version: str | None, installed: Collection[str] = ()
) -> Iterator[PackageFinding]:
    """Check a configuration of one of verl's trainers. Raises ConfigError. `installed`: names under which the plug-in
    is an entry point of the group ``verl.plugins``.
    """
    ppo = get("actor_rollout_ref") is not None
    if not ppo and get("engine") is None:
        raise ConfigError("the configuration has neither actor_rollout_ref (PPO) nor engine (SFT)")
    yield from _plugin(environment, version, ppo, _let_through(environment, installed))
    if str(get("trainer.device")) not in ("cuda", "cpu"):
        yield PackageFinding("stops", "trainer.device", f"{get('trainer.device')}: our engines are for cuda and cpu")
    for role in _roles(get, ppo):
        yield from _engine(get, role)
    yield from _saves(get, ppo)
    yield from _resume(get)
    if ppo:
        yield from _weight_sync(get)


def _let_through(environment: Mapping[str, str], installed: Collection[str]) -> Collection[str]:
    """Return the entry points that verl loads: all with ``auto``, none with ``none``, else those that are named."""
    policy = environment.get(PLUGINS, "auto").strip().lower()
    named = {name.strip() for name in policy.split(",")}
    return [name for name in installed if policy == "auto" or name in named - {"none"}]


def _plugin(
    environment: Mapping[str, str], version: str | None, ppo: bool, entry_points: Collection[str]
) -> Iterator[PackageFinding]:
    if version is None or not is_tested(version):
        text = "is not installed here" if version is None else f"is {version}"
        known = ".".join(map(str, TESTED))
        yield PackageFinding("stops", "verl", f"{text}; the plug-in is for {known}.x, else it is off")
    else:
        yield PackageFinding("ours", "verl", f"is {version}, which the plug-in is for")
    for name, wanted, is_set in (
        (MODULES, PLUGIN, PLUGIN in [one.strip() for one in environment.get(MODULES, "").split(",")]),
        (ENGINES, VENDOR, environment.get(ENGINES) == VENDOR),
    ):
        has = environment.get(name)
        if is_set:
            yield PackageFinding("ours", name, f"has {wanted}")
            continue
        if name == MODULES and entry_points:
            text = f"is not needed: verl finds the plug-in by its entry point {', '.join(entry_points)}"
            yield PackageFinding("ours", name, text)
            continue
        value = ",".join(filter(None, (has, wanted))) if name == MODULES else wanted
        add = [f"export {name}={value}"]
        if ppo:
            add.append(f'+ray_kwargs.ray_init.runtime_env.env_vars.{name}="{value}"')
        text = "is not set" if not has else f"is {has}, without {wanted}"
        yield PackageFinding("stops", name, f"{text}: verl does not ask for us", add)


def _roles(get: Get, ppo: bool) -> list[_Role]:
    if not ppo:
        return [_Role("engine", "engine", "engine", "checkpoint", "model")]
    actor = "actor_rollout_ref.actor"
    roles = [_Role("actor", actor, f"{actor}.megatron", f"{actor}.checkpoint", "actor_rollout_ref.model")]
    enabled = get("critic.enable")
    if enabled or (enabled is None and get("algorithm.adv_estimator") == "gae"):
        roles.append(_Role("critic", "critic", "critic.megatron", "critic.checkpoint", "critic.model"))
    return roles


def _engine(get: Get, role: _Role) -> Iterator[PackageFinding]:
    strategy = get(f"{role.engine}.strategy")
    if not isinstance(strategy, str):
        raise ConfigError(f"{role.engine}.strategy has to be the name of an engine of verl's, not {strategy!r}")
    kind = "value_model" if role.name == "critic" else "language_model"
    subject = f"{role.engine}.strategy"
    if strategy not in _STRATEGIES:
        text = f"{strategy}: there is an engine of ours for {', '.join(_STRATEGIES)} only; verl saves this one itself"
        yield PackageFinding("stops", subject, text)
        return
    stopping = list(_megatron(get, role)) if strategy == "megatron" else list(_fsdp(get, role))
    yield from stopping
    if not stopping:
        text = f"{strategy}, {kind}: saves in the background, committed when all is written"
        yield PackageFinding("ours", subject, text)
    yield from _contents(get, role)


def _has_lora(get: Get, role: _Role) -> bool:
    return any(_number(get, f"{role.model}.{key}") > 0 for key in ("lora_rank", "lora.rank"))


def _megatron(get: Get, role: _Role) -> Iterator[PackageFinding]:
    if _has_lora(get, role):
        text = "LoRA through Megatron-Bridge: verl saves it itself"
        yield PackageFinding("stops", f"{role.model}.lora.rank", text)
    if get(f"{role.megatron}.use_megatron_fsdp"):
        text = "checkpoints of Megatron-FSDP are not made here: verl saves them itself"
        yield PackageFinding("stops", f"{role.megatron}.use_megatron_fsdp", text)


def _fsdp(get: Get, role: _Role) -> Iterator[PackageFinding]:
    if _has_lora(get, role) and "hf_model" in _names(get, f"{role.checkpoint}.save_contents"):
        text = "hf_model of a model with a LoRA adapter is refused, and verl saves all of this engine itself"
        yield PackageFinding("stops", f"{role.checkpoint}.save_contents", text)


def _contents(get: Get, role: _Role) -> Iterator[PackageFinding]:
    for key in ("save_contents", "load_contents"):
        subject = f"{role.checkpoint}.{key}"
        names = _names(get, subject)
        if missing := [name for name in _WHOLE if name not in names]:
            text = f"is without {', '.join(missing)}: a resume is not bit for bit the same run"
            add = [f"{subject}=[{','.join([*names, *missing])}]"]
            yield PackageFinding("verl", subject, text, add)
    if get(f"{role.checkpoint}.async_save"):
        subject = f"{role.checkpoint}.async_save"
        text = "our saves are in the background without it; with it verl writes no tracker of the newest checkpoint"
        yield PackageFinding("stops", subject, text, [f"{subject}=False"])


def _saves(get: Get, ppo: bool) -> Iterator[PackageFinding]:
    key = "trainer.save_freq"
    each_epoch = not ppo and get(key) == "after_each_epoch"
    if not each_epoch and _number(get, key) <= 0:
        text = f"is {get(key)}: nothing is saved" + ("" if ppo else " before the last step")
        yield PackageFinding("stops" if ppo else "verl", key, text, [f"{key}=20"])
    key = "trainer.default_local_dir"
    if (place := get(key)) is None:
        raise ConfigError(f"{key} is not set; it is the folder of the checkpoints")
    if "://" in str(place):
        text = f"{place} is not a local folder; commits are renames in a file system"
        yield PackageFinding("stops", key, text)
    else:
        yield PackageFinding("ours", key, f"{place}: the checkpoint folder, with a monitor of its own")
    if (remote := get("trainer.default_hdfs_dir")) is not None:
        text = f"{remote}: copied after the commit by Megatron's engine, not at all by FSDP's (as in verl)"
        if not ppo:
            text = f"{remote}: verl's copy to it is made after the commit, by rank 0 or by Ray's driver"
        yield PackageFinding("verl", "trainer.default_hdfs_dir", text)
    kept = {get(f"trainer.max_{role}_ckpt_to_keep") for role in ("actor", "critic")} if ppo else set()
    if len(kept) > 1 and len(_roles(get, ppo)) > 1:
        text = "differ; a limit counts whole steps, so the smaller one holds for both"
        yield PackageFinding("verl", "trainer.max_*_ckpt_to_keep", text)
    if ppo:
        yield from _callback(get)
    if _number(get, "trainer.esi_redundant_time") > 0:
        text = "verl times a save that returns before the state is copied: add the time that copying and writing take"
        yield PackageFinding("verl", "trainer.esi_redundant_time", text)


def _callback(get: Get) -> Iterator[PackageFinding]:
    key = "trainer.checkpoint_callback_class"
    name = get(key)
    if not get("trainer.use_v1"):
        if name is not None:
            yield PackageFinding("verl", key, "is not called: only the V1 trainer (trainer.use_v1) does so")
    elif name == CALLBACK:
        yield PackageFinding("ours", key, "is ours: a step is committed as soon as it is written")
    elif name is None:
        text = "is not set: a step is committed when its engines are used again, with ours as soon as it is written"
        yield PackageFinding("verl", key, text, [f"{key}={CALLBACK}"])
    else:
        text = f"{name}: is called before the commit, for which it must not wait"
        yield PackageFinding("verl", key, text)


def _resume(get: Get) -> Iterator[PackageFinding]:
    key = "trainer.resume_mode"
    mode = get(key)
    if mode == "auto":
        yield PackageFinding("ours", key, "auto: resumes from the newest checkpoint that verifies")
    elif mode == "disable":
        yield PackageFinding("verl", key, "disable: a start begins with the initial weights", [f"{key}=auto"])
    elif mode == "resume_path":
        path = get("trainer.resume_from_path")
        if path is None:
            raise ConfigError("trainer.resume_mode is resume_path, but trainer.resume_from_path is not set")
        text = f"resume_path: loads {path}; chosen by the user and not verified"
        yield PackageFinding("verl", key, text)
    else:
        raise ConfigError(f"{key} is {mode}; it has to be auto, disable or resume_path")


def _weight_sync(get: Get) -> Iterator[PackageFinding]:
    group = "actor_rollout_ref.rollout.checkpoint_engine"
    key, module = f"{group}.backend", f"{group}.custom_backend_module"
    backend, mode = get(key), get("trainer.v1.trainer_mode")
    apart = bool(get("trainer.use_v1")) and mode == "separate_async"
    ours = [f"{key}={VENDOR}", f"{module}={PLUGIN}"]
    if not apart and backend != "naive":
        text = f"is {backend}, but verl takes naive: it asks a backend only with trainer.v1.trainer_mode=separate_async"
        yield PackageFinding("stops", key, text, ["trainer.v1.trainer_mode=separate_async"])
    elif not apart:
        yield PackageFinding("verl", key, "naive: trainer and rollout share GPUs, verl hands weights over")
    elif backend == "naive":
        text = "is naive, which verl refuses with trainer.v1.trainer_mode=separate_async"
        yield PackageFinding("stops", key, text, ours)
    elif backend != VENDOR:
        yield PackageFinding("verl", key, f"is {backend}: weight sync is not ours", ours)
    elif get(module) != PLUGIN:
        text = f"is {get(module)}: verl does not know the backend {VENDOR}"
        yield PackageFinding("stops", module, text, ours[1:])
    else:
        yield PackageFinding("ours", key, f"is {VENDOR}: weight sync is ours")


def _number(get: Get, key: str) -> float:
    value = get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} has to be a number, not {value!r}")
    return value


def _names(get: Get, key: str) -> list[str]:
    value = get(key)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{key} has to be a list of names, not {value!r}")
    return [str(name) for name in value]
