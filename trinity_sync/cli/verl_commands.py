"""The command `trinity-sync verl doctor`: whether a program of verl would use this package with its configuration."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.host.package_source import installed_version


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `trinity-sync`."""
    verl = commands.add_parser("verl", help="look whether a program of verl's would save and sync through us")
    doctor = verl.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "doctor",
        help="print what would be ours, what prevents it, and the lines to add; exit code 1 if something does",
    )
    doctor.add_argument(
        "--config",
        "--config-name",
        "-cn",
        default="ppo_trainer",
        metavar="NAME",
        help="one of verl's trainers, such as ppo_trainer or sft_trainer_engine; or a YAML file, such as a run's",
    )
    doctor.add_argument("--config-path", "-cp", metavar="DIR", help="where NAME is; without it, in verl")
    doctor.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the program's overrides")
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from trinity_sync.integrations.verl.doctor import findings
    from trinity_sync.integrations.verl.vendor import PLUGIN

    get = _composed(options.config, options.config_path, options.overrides)
    installed = [one.name for one in entry_points(group="verl.plugins") if one.value == PLUGIN]
    found = list(findings(get, os.environ, installed_version("verl"), installed))
    width = max(len(one.subject) for one in found)
    for one in found:
        print(f"{one.state:<6} {one.subject:<{width}}  {one.text}")
    lines = list(dict.fromkeys(line for one in found for line in one.add))
    if lines:
        print("\nto add (export lines before verl's command, the rest at its end):")
        print("\n".join(f"  {line if line.startswith('export ') else shlex.quote(line)}" for line in lines))
    stopping = any(one.state == "stops" for one in found)
    print("\nsomething is in the way" if stopping else "\nthis program would use us")
    return 1 if stopping else 0


def _composed(name: str, folder: str | None, overrides: Sequence[str]) -> Callable[[str], object]:
    """Compose a configuration as verl's programs do; return the function that reads its keys."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    place = _place(name, folder)
    try:
        with initialize_config_dir(version_base=None, config_dir=str(place.parent)):
            config = compose(config_name=place.name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{place}: {_one_line(error)}") from error

    def get(key: str) -> object:
        try:
            value = OmegaConf.select(config, key)
            return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{place}: {key} cannot be read: {_one_line(error)}") from error

    return get


def _place(name: str, folder: str | None) -> Path:
    """Return the file of a configuration."""
    if folder is None and name.endswith((".yaml", ".yml")):
        place = Path(name).absolute()
    else:
        place = (Path(folder).absolute() if folder is not None else _of_verl()) / name
        if place.suffix not in (".yaml", ".yml"):
            place = place.with_name(f"{place.name}.yaml")
    if not place.is_file():
        known = ", ".join(sorted(one.stem for one in place.parent.glob("[!_]*.yaml"))) or "no configuration"
        raise ConfigError(f"--config {name}: there is no {place}; {known} is there")
    return place


def _of_verl() -> Path:
    found = importlib.util.find_spec("verl")  # does not import it
    if found is None or not found.submodule_search_locations:
        raise ConfigError("verl is not installed here; name a YAML file, --config FILE, or its folder, --config-path")
    return Path(next(iter(found.submodule_search_locations))) / "trainer" / "config"


def _one_line(error: Exception) -> str:
    cause = f"; {error.__cause__}" if error.__cause__ is not None else ""
    return " ".join(f"{error}{cause}".split())
