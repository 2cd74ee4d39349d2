from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.samples.keys import GAMMA, child, path
from trinity_sync.samples.record import Purpose

WORD = st.integers(0, 2**64 - 1)


def splitmix64(seed: int, count: int) -> list[int]:
    """The sequential generator, in plain integers."""
    outputs = []
    for _ in range(count):
        seed = (seed + GAMMA) % 2**64
        value = seed
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        outputs.append(value ^ (value >> 31))
    return outputs


def test_children_are_the_published_outputs_of_splitmix64() -> None:
    # seed 1234567: the reference values that many implementations quote
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert child(1234567, np.arange(5)).tolist() == expected


@given(seed=WORD)
def test_children_in_any_order_are_the_sequential_outputs(seed: int) -> None:
    assert child(seed, [3, 0, 2]).tolist() == [splitmix64(seed, 4)[i] for i in (3, 0, 2)]


@given(seed=st.integers(-(2**70), 2**70), step=st.integers(0, 2**40))
def test_a_path_does_not_depend_on_what_is_asked_beside_it(seed: int, step: int) -> None:
    together = path(seed, Purpose.SAMPLING, step, np.array([4, 7, 7]), np.array([1, 0, 5]))
    alone = [path(seed, Purpose.SAMPLING, step, prompt, sample)[0] for prompt, sample in ((4, 1), (7, 0), (7, 5))]
    assert together.tolist() == alone


def test_paths_that_differ_anywhere_lead_to_different_keys() -> None:
    seeds, steps, prompts, samples = 3, 10, 20, 16
    keys = {
        int(key)
        for seed in range(seeds)
        for purpose in Purpose
        for step in range(steps)
        for key in path(seed, purpose, step, np.arange(prompts)[:, None], np.arange(samples)).flat
    }
    assert len(keys) == seeds * len(Purpose) * steps * prompts * samples


@pytest.mark.parametrize("bit", [0, 31, 63])
def test_each_bit_of_neighbouring_keys_is_set_in_half_of_them(bit: int) -> None:
    keys = path(0, Purpose.SAMPLING, 1, np.arange(100)[:, None], np.arange(100))
    # standard deviation of the share is 0.005
    assert np.mean((keys >> np.uint64(bit)) & np.uint64(1)) == pytest.approx(0.5, abs=0.02)
