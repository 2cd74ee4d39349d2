"""Prompts as tokens, by a model's own tokenizer and chat template: the same for the look at all rows before a run and
for those who generate. Nothing heavy is imported; the tokenizer is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from trinity_sync.errors import ConfigError, RunError
from trinity_sync.models.tokens import beyond_embedding, prompt_tokens
from trinity_sync.samples.record import Prompt
from trinity_sync.tasks.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from trinity_sync.models.tokens import ModelTokens


class PromptEncoder:
    """Prompts to tokens, checked.

    Args:
        tokenizer: of the model.
        response_length: longest response, in tokens.
        prompt_length: longest prompt, in tokens; None: as long as the positions allow.
        positions: of the model, in tokens; None: unknown.
        truncate: cut what is too long on its left, rather than refuse it.
        chat_template: arguments of the tokenizer's chat template.
        embedded: rows of the model's embedding; None: unknown.

    Attributes:
        limit: longest prompt, in tokens; None: any.
        cut: words on what is cut off.

    Raises:
        ConfigError: no prompt would fit, or see `ChatTemplate`.
    """

    cut = "their left end"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        response_length: int,
        prompt_length: int | None = None,
        positions: int | None = None,
        truncate: bool = False,
        chat_template: Mapping[str, object] | None = None,
        embedded: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._embedded = embedded
        self._response_length = response_length
        self._prompt_length = prompt_length
        self._positions = positions
        self._truncate = truncate
        self._template = ChatTemplate(tokenizer, chat_template or {})
        room = None if positions is None else positions - response_length
        if room is not None and room < 1:
            raise ConfigError(
                f"task.response_length is {response_length}, which leaves no room for a prompt in the {positions} "
                "positions of the model"
            )
        self.limit = min((limit for limit in (prompt_length, room) if limit is not None), default=None)

    @classmethod
    def of_task(cls, task: Mapping[str, Any], tokens: ModelTokens) -> Self:
        """The encoder that the keys of `task` ask for; those of a user's own class need not be ours."""
        return cls(
            tokens.tokenizer,
            response_length=task["response_length"],
            prompt_length=task.get("prompt_length"),
            positions=positions_of(tokens.config),
            truncate=task.get("too_long") == "truncate",
            chat_template=task.get("chat_template"),
            embedded=tokens.embedded,
        )

    def encode(self, prompt: Prompt, where: str) -> list[int]:
        """The tokens of a prompt.

        Args:
            prompt: a text, or a chat.
            where: names it in errors.

        Raises:
            RunError: it has characters without a token, no token, too many, or needs a chat template that the tokenizer
                lacks.
        """
        ids = self._one(prompt, where)
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if self._truncate:
            return ids[-self.limit :]
        raise RunError(f"{where} has {len(ids)} tokens; {self.limit_text}")

    def lengths(self, prompts: Sequence[Prompt], places: Sequence[str]) -> list[int]:
        """How many tokens prompts have, whatever the limit is: many at a time, which is much faster.

        Raises:
            RunError: as `encode`, but for the length; of the first that is wrong.
        """
        try:
            rows = self._many(prompts)
        except Exception:  # one at a time, so as to say which it is
            rows = [self._one(prompt, where) for prompt, where in zip(prompts, places, strict=True)]
        for prompt, where, ids in zip(prompts, places, rows, strict=True):
            self._check(prompt, where, ids)
        return [len(ids) for ids in rows]

    @property
    def limit_text(self) -> str:
        """Words on what the limit comes from."""
        if self.limit == self._prompt_length:
            return f"task.prompt_length allows {self.limit}"
        return (
            f"with a response of {self._response_length} that is more than the {self._positions} positions of the model"
        )

    def remedy(self, longest: int) -> str:
        """Words on which setting would let prompts of so many tokens in."""
        room = None if self._positions is None else self._positions - self._response_length
        return f"task.prompt_length={longest}" if room is None or longest <= room else "a smaller task.response_length"

    def _one(self, prompt: Prompt, where: str) -> list[int]:
        if prompt.messages is not None and not self._template.present:
            raise RunError(f"{where} is a chat, but the tokenizer has no chat template; give prompts as texts")
        try:
            ids = (
                prompt_tokens(self._tokenizer, [prompt.text])[0]
                if prompt.messages is None
                else self._template.tokens([self._template.render(prompt.messages, ask=True)])[0]
            )
        except Exception as error:
            raise RunError(f"{where} cannot be tokenised: {self._unknown(prompt.text) or error}") from error
        self._check(prompt, where, ids)
        return ids

    def _many(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        chats = [prompt.messages for prompt in prompts if prompt.messages is not None]
        texts = [prompt.text for prompt in prompts if prompt.messages is None]
        if chats and not self._template.present:
            raise RunError("a chat without a template")
        rendered = [self._template.render(chat, ask=True) for chat in chats]
        of_chats = iter(self._template.tokens(rendered))
        of_texts = iter(prompt_tokens(self._tokenizer, texts))
        return [next(of_texts if prompt.messages is None else of_chats) for prompt in prompts]

    def _check(self, prompt: Prompt, where: str, ids: Sequence[int]) -> None:
        if self._tokenizer.unk_token_id in ids and self._has_unknown(prompt):
            raise RunError(f"{where} cannot be tokenised: {self._unknown(prompt.text) or 'a part is unknown'}")
        if not ids:
            raise RunError(f"{where} has no token")
        if text := beyond_embedding(self._tokenizer, ids, self._embedded):
            raise RunError(f"{where} {text}")

    def _has_unknown(self, prompt: Prompt) -> bool:
        """Whether the unknown token in a prompt stands for what the tokenizer does not know. Some tokenizers begin each
        text with that same token, and their chat templates write it.
        """
        unknown = self._tokenizer.unk_token_id
        if unknown not in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, self._tokenizer.pad_token_id):
            return True
        texts = [prompt.text] if prompt.messages is None else [message["content"] for message in prompt.messages]
        encoded = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        written = [text.count(str(self._tokenizer.unk_token)) for text in texts]
        return any(ids.count(unknown) > said for ids, said in zip(encoded, written, strict=True))

    def _unknown(self, text: str) -> str:
        """Say which characters the tokenizer does not have, as a sentence; empty where it has each of them."""
        unknown = [repr(character) for character in dict.fromkeys(text) if not self._has(character)]
        return f"the tokenizer has no token for {', '.join(unknown)}" if unknown else ""

    def _has(self, character: str) -> bool:
        try:
            ids = self._tokenizer(character, add_special_tokens=False)["input_ids"]
        except Exception:
            return False
        return bool(ids) and self._tokenizer.unk_token_id not in ids


def positions_of(config: PreTrainedConfig) -> int | None:
    """How many tokens a model has positions for; None: its config does not say."""
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions
