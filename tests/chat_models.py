"""A tiny model that knows any text: its tokens are bytes, and its chats have the marks that Qwen's have."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trinity_sync.models.architecture import make_model

_BEGIN, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_TEMPLATE = (
    "{% for message in messages %}"
    f"{_BEGIN}{{{{ message.role }}}}\n{{{{ message.content }}}}{_END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{_BEGIN}assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte of UTF-8, and one for each mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_END,
        additional_special_tokens=[_BEGIN],
        chat_template=_TEMPLATE,
    )


def make_chat_model(folder: Path) -> Path:
    """Write a Qwen3 with random weights, small enough for a CPU."""
    tokenizer = byte_tokenizer()
    make_model(
        {
            "model_type": "qwen3",
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        0,
        folder,
    )
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((folder / name).read_text())
        said |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        (folder / name).write_text(json.dumps(said))
    return folder
