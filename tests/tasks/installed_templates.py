"""The chat templates of installed packages, as files or in their code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PACKAGES = ("transformers", "vllm", "trl", "mistral_common")
_MARK = re.compile(r"<[^<>\s{}'\"%]{1,40}>|\[/?[A-Z_]{2,30}\]")
"""What templates write that is one token of its model's tokenizer."""


def templates_of(package: str) -> dict[str, str]:
    """Templates by their places; none where the package is not installed. None of its code is run but Mistral's, whose
    templates are generated.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(next(iter(spec.submodule_search_locations)))
    if package == "mistral_common":
        return dict(_generated())
    return {
        str(path.relative_to(root)) + place: text
        for path in sorted(root.rglob("*"))
        if path.suffix in (".jinja", ".py")
        for place, text in ([("", path.read_text())] if path.suffix == ".jinja" else _in_code(path))
        if "messages" in text
    }


def _in_code(path: Path) -> Iterator[tuple[str, str]]:
    source = path.read_text(errors="ignore")
    if "{%" not in source or "messages" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\{% *-? *for", node.value):
            yield f":{node.lineno}", node.value


def _generated() -> Iterator[tuple[str, str]]:
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    efforts: tuple[tuple[tuple[str, ...] | None, str | None], ...] = ((None, None), (("none", "high"), "none"))
    for version, spm, (values, default) in product(TokenizerVersion, (False, True), efforts):
        try:
            text = generate_chat_template(
                spm=spm,
                tokenizer_version=version,
                image_support=False,
                audio_support=False,
                thinking_support=False,
                default_system_prompt=None,
                plain_thinking_support=False,
                use_special_token_variables=True,
                model_settings_fields=None,
                reasoning_effort_values=values,
                reasoning_effort_default=default,
            )
        except ValueError:  # there is none of this kind
            continue
        yield f"{version.value}{'-spm' if spm else ''}", text


def marking_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token for each byte of UTF-8, and one for each mark that a template writes."""
    ends = ("<pad>", "<eos>", "<bos>")
    marks = sorted({*_MARK.findall(template)} - {*ends})
    names = [*ends, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=ends[0],
        eos_token=ends[1],
        bos_token=ends[2],
        additional_special_tokens=marks,
        chat_template=template,
    )
