"""A tokenizer with a chat template, of words of one character."""

from __future__ import annotations

from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from trinity_sync.models.architecture import character_tokenizer

TEMPLATE = (
    "{%- if messages[0].role != 'system' %}{{ '%*;' }}{% endif %}"
    "{%- if tools %}{{ '#' }}{% for tool in tools %}{{ tool.name }};{% endfor %}{% endif %}"
    "{%- for message in messages %}{{ '<' + {'user': '0', 'assistant': '1', 'system': '2'}[message.role] + ':' }}"
    "{{ message.content }}{{ '>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<1:' }}{% if enable_thinking is defined and not enable_thinking %}{{ '-+' }}"
    "{% endif %}{% endif %}"
)
"""``%*;`` before a chat without a system message, ``#7;`` for a tool named 7, ``<0:1+1=>`` for what the user says, and
``<1:`` to make the model answer, ``-+`` behind it where it is not to think.
"""


def chat_tokenizer(template: str | dict[str, str] | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(32)
    tokenizer.chat_template = template
    return tokenizer


def ending_tokenizer() -> PreTrainedTokenizerFast:
    """One that puts an end token behind each text."""
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="␂ $A ␃", special_tokens=[("␂", 1), ("␃", 2)]
    )
    return tokenizer


def said(*contents: str, system: str | None = None) -> list[dict[str, object]]:
    """A chat in which user and assistant take turns."""
    turns: list[dict[str, object]] = [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]
