"""The Ray of the tests. Where a fork is refused, Ray starts a process of its own, and tests take longer."""

from __future__ import annotations

import psutil
import pytest
import ray

from tests import local_ray

LIMIT = 60.0


class Actor:
    def begun_by(self) -> str:
        return " ".join(psutil.Process().parent().cmdline())


def begun_by() -> str:
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    return str(ray.get(actor.begun_by.remote(), timeout=LIMIT))


@pytest.mark.parametrize("driver", ["first", "second"])
def test_actors_of_each_driver_are_forks_but_where_that_is_ruled_out(driver: str) -> None:
    with local_ray.joined():
        assert "fork_server.py" in begun_by()
        with local_ray.alone():
            assert "fork_server.py" not in begun_by()
