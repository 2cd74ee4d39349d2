"""Samples made up for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from trinity_sync.samples.record import Sample


def sample(
    step: int = 1,
    prompt: int = 0,
    number: int = 0,
    *,
    prompt_ids: tuple[int, ...] = (1, 7),
    response_ids: tuple[int, ...] = (7, 2),
    version: tuple[int, int] = (0, 0),
    reward: float | None = 0.0,
    exact: float | None = 0.0,
    error: str = "",
) -> Sample:
    return Sample(
        step=step,
        prompt=prompt,
        sample=number,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        log_probs=tuple(-0.5 * (place + 1) for place in range(len(response_ids))),
        version=version,
        reward=reward,
        exact=exact,
        error=error,
        text="".join(map(str, response_ids)),
        finished=response_ids[-1:] == (2,),
    )


_IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple)


@st.composite
def samples(draw: st.DrawFn, max_size: int = 8) -> list[Sample]:
    """Samples with different (step, prompt, sample), in any order; those of one prompt have its tokens."""
    places = st.tuples(st.integers(1, 2), st.integers(0, 3), st.integers(0, 3))
    chosen = draw(st.lists(places, unique=True, max_size=max_size))
    prompts = {place[:2]: draw(_IDS) for place in chosen}
    return [
        sample(
            *place,
            prompt_ids=prompts[place[:2]],
            response_ids=draw(_IDS),
            version=(draw(st.integers(0, 3)), draw(st.integers(0, 9))),
            reward=draw(st.none() | st.floats(-5, 5)),
            exact=draw(st.sampled_from([None, 0.0, 1.0])),
            error=draw(st.sampled_from(["", "it raised"])),
        )
        for place in chosen
    ]
