"""Each method of a client calls one that its actor has, with arguments that this takes. No type checker sees that."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.client import Client
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.handles import HandleMethod
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.explorer.actor import Explorer
from trinity_sync.sync.node_agent import NodeAgent
from trinity_sync.sync.synchronizer import Synchronizer, SynchronizerActor


class Given(dict[str, Any]):
    """An argument of any kind, by the name of its parameter."""

    step = version = 0  # by which calls are named

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Handle:
    """Takes down what is called, as an actor's handle would call it."""

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*args: Any, **kwargs: Any) -> None:
                self.called.append((method, args, kwargs))

        return Method


def rank_client(handle: Any) -> tuple[RankClient, type]:
    from trinity_sync.trainer.group import OWN, rank_actor
    from trinity_sync.trainer.worker import TrinityWorker

    actor = rank_actor(None)
    answers = {name: getattr(actor if name in OWN else TrinityWorker, name) for name in vars(actor) if name[0] != "_"}
    return RankClient(handle, 0), type("Rank", (), answers)


MAKE: dict[str, Any] = {
    "monitor": lambda handle: (MonitorClient(handle), CheckpointMonitor),
    "agent": lambda handle: (AgentClient(handle, "here"), NodeAgent),
    "explorer": lambda handle: (ExplorerClient(handle, "explorer-0"), Explorer),
    "rank": rank_client,
    "synchronizer": lambda handle: (SynchronizerClient(handle, 1.0), SynchronizerActor),
}


@pytest.mark.parametrize("whose", MAKE)
def test_what_a_client_asks_its_actor_can_answer(whose: str) -> None:
    handle = Handle()
    client, actor = MAKE[whose](handle)
    assert isinstance(client, Client)
    methods = [name for name in vars(type(client)) if not name.startswith("_")]
    assert methods
    for name in methods:
        method = getattr(client, name)
        parameters = inspect.signature(method).parameters.values()
        for passed in (parameters, [one for one in parameters if one.default is one.empty]):
            arguments = {one.name: Given(one.name) for one in passed}
            method(**arguments)
            called, args, kwargs = handle.called.pop()
            assert called == name
            bound = inspect.signature(getattr(actor, called)).bind(None, *args, **kwargs).arguments
            for parameter, value in bound.items():
                if isinstance(value, Given):
                    assert {value.name, parameter} in ({parameter}, {"weights", "is_state_dict"})


def test_what_programs_ask_the_synchronizer_it_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    synchronizer = Synchronizer(cast(Any, handle), 1.0)
    monkeypatch.setattr(synchronizer, "_attach", Given)
    not_asked = {"set_model_state_dict", "get_model_state_dict", "get_model_state_dict_iterator", "_iterate"}
    methods = [name for of in Synchronizer.__mro__ for name, own in vars(of).items() if isinstance(own, HandleMethod)]
    assert {"wait_new_model_state_dict", "ready_to_nccl_sync", "get_trainer_status"} <= set(methods)
    for name in set(methods) - not_asked:
        own = inspect.getattr_static(Synchronizer, name)
        parameters = list(inspect.signature(own.__wrapped__).parameters.values())[1:]
        for passed in (parameters, [one for one in parameters if one.default is one.empty]):
            given = {one.name: 7 if one.name in ("master_port", "trainer_step") else "asked" for one in passed}
            getattr(synchronizer, name).remote(
                **(given | ({"state_dict_meta": []} if "state_dict_meta" in given else {}))
            )
            called, args, kwargs = handle.called.pop()
            inspect.signature(getattr(SynchronizerActor, called)).bind(None, *args, **kwargs)
