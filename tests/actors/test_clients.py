"""The calls of clients: their names, arguments and words. mypy compares arguments with the actor's signatures."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest

from trinity_sync.actors.agent_client import AgentClient
from trinity_sync.actors.client import Client, RemoteMethod
from trinity_sync.actors.explorer_client import ExplorerClient
from trinity_sync.actors.handles import HandleMethod
from trinity_sync.actors.monitor_client import MonitorClient
from trinity_sync.actors.rank_client import RankClient
from trinity_sync.actors.synchronizer_client import SynchronizerClient
from trinity_sync.checkpoint import CheckpointMonitor
from trinity_sync.explorer.actor import Explorer
from trinity_sync.protocol.versions import Version
from trinity_sync.sync import synchronizer_handle
from trinity_sync.sync.node_agent import NodeAgent
from trinity_sync.sync.synchronizer import SynchronizerActor
from trinity_sync.sync.synchronizer_handle import Synchronizer
from trinity_sync.trainer.group import TrainerRank
from trinity_sync.trainer.worker import TrinityWorker


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


CLIENTS: dict[type[Client], tuple[type, ...]] = {
    MonitorClient: (CheckpointMonitor,),
    AgentClient: (NodeAgent,),
    ExplorerClient: (Explorer,),
    RankClient: (TrainerRank, TrinityWorker),
    SynchronizerClient: (SynchronizerActor,),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_each_call_has_the_name_of_the_actors_method_and_can_be_described(client: type[Client]) -> None:
    methods = {name: method for name, method in vars(client).items() if isinstance(method, RemoteMethod)}
    assert methods
    for name, method in methods.items():
        assert method.name == name
        [of_actor] = [getattr(actor, name) for actor in CLIENTS[client] if hasattr(actor, name)][:1]
        _, *parameters = inspect.signature(of_actor).parameters.values()
        args = [Given(one.name) for one in parameters if one.kind is not one.KEYWORD_ONLY]
        kwargs = {one.name: Given(one.name) for one in parameters if one.kind is one.KEYWORD_ONLY}
        assert method.what.format(*args, **kwargs)


def test_a_call_goes_to_the_actors_method_with_its_arguments_and_its_words() -> None:
    handle = Handle()
    call = AgentClient(cast(Any, handle), "here").part_staged(Version(0, 3), 1, "rank-00000", blocked_s=0.5)
    assert handle.called == [("part_staged", (Version(0, 3), 1, "rank-00000"), {"blocked_s": 0.5})]
    assert (call.who, call.what) == ("the agent of node here", "take rank-00000 of version 3")


def test_a_call_without_the_argument_that_its_words_name_has_the_methods_name() -> None:
    call = MonitorClient(cast(Any, Handle())).notify_finished(3)
    assert call.what == "notify finished"


def test_what_programs_ask_the_synchronizer_it_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    synchronizer = Synchronizer(cast(Any, handle), 1.0)
    monkeypatch.setattr(synchronizer, "_attach", Given)
    monkeypatch.setattr(synchronizer_handle, "this_process", Given)  # which asks Ray, and would start one
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
