from __future__ import annotations

import dataclasses
import pickle

import pytest

from tests.samples.helpers import sample
from trinity_sync.samples.record import Prompt

PROMPT = Prompt(index=3, text="61=", answer="61", fields={"source": "test"})


@pytest.mark.parametrize("item", [PROMPT, sample(2, 3, 4)])
def test_records_survive_pickling(item: object) -> None:
    assert pickle.loads(pickle.dumps(item)) == item


@pytest.mark.parametrize(("item", "name"), [(PROMPT, "text"), (sample(), "reward")])
def test_records_cannot_be_changed(item: object, name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(item, name, None)
