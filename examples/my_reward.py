"""A reward function of one's own: any number, of the prompt and the response.

Named by ``task.reward=my_reward.digits_right``; keys beside it, such as ``task.reward.whole=2``, are its
arguments.
"""

from __future__ import annotations

from trinity_sync.samples.record import Prompt


def digits_right(prompt: Prompt, response: str, *, finished: bool, whole: float = 1.0) -> float:
    """Give a share of 1 for each digit that stands in its place, and `whole` more where all of it is right.

    Args:
        prompt: `text` is what the model was given, `answer` what the file has for it.
        response: what the model said.
        finished: whether it ended the response itself.
        whole: what a right response is worth beside its digits.
    """
    answer = str(prompt.answer)
    right = sum(said == wanted for said, wanted in zip(response, answer, strict=False))
    return right / len(answer) + whole * (finished and response == answer)
