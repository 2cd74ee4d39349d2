from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.explorer.helpers import ARCHITECTURE, engine_of, load, loaded
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.explorer.hf import HFEngine
from trinity_sync.models.architecture import CHARACTERS, SPECIAL, make_model
from trinity_sync.samples.batch import SampleBatch, assign
from trinity_sync.samples.record import Drawing, Prompt, Purpose
from trinity_sync.tasks.base import RewardResult
from trinity_sync.tasks.copy_digits import CopyDigits

TASK = CopyDigits(2, 0)
PROMPTS = TASK.prompts(1, 8)
MIXED = [
    Prompt(index=index, text=text, answer="") for index, text in enumerate(["1=", "12345=", "", "61=", "000000000"])
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(ARCHITECTURE, 0, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    """A model folder to change."""
    return Path(shutil.copytree(path, tmp_path / "model"))


def generate(engine: HFEngine, prompts: list[Prompt] = PROMPTS, **changes: Any) -> SampleBatch:
    settings: dict[str, Any] = {"step": 1, "samples_per_prompt": 4, "version": (0, 0)} | changes
    return engine.generate(prompts, settings.pop("task", TASK), **settings)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# the empty model


@pytest.mark.parametrize(
    "architecture",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"model_type": "gemma2", "query_pre_attn_scalar": 32, "attn_logit_softcapping": None},
        {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    ],
    ids=["qwen3", "tied", "llama", "gemma2", "qwen3_moe"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_empty_model_that_was_given_weights_is_the_pretrained_one(
    tmp_path: Path, architecture: dict[str, Any], dtype: str
) -> None:
    path = make_model(ARCHITECTURE | architecture, 0, tmp_path / "model")
    engine = loaded(path, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=next(engine.model.parameters()).dtype)
    ids = torch.arange(3, 25)[None]
    with torch.inference_mode():
        assert torch.equal(engine.model(ids).logits, expected(ids).logits)


def test_a_full_gpu_at_the_start_is_not_called_a_setting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(engine_of(path).model), "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        engine_of(path, dtype="bf16", keep_fp32=["*layernorm*"])


@pytest.mark.parametrize("kept", ["*layernorm*", "self_attn.q_proj", "embed_tokens"])
def test_what_could_not_compute_with_the_rest_is_refused_at_the_start(path: Path, kept: str) -> None:
    with pytest.raises(ConfigError, match=r"^sync\.keep_fp32 keeps model\..* explorer\.dtype=bfloat16: .*dtype"):
        engine_of(path, dtype="bf16", keep_fp32=[kept])
    engine_of(path, keep_fp32=[kept])


def test_an_empty_model_draws_no_random_numbers(path: Path) -> None:
    before = torch.get_rng_state()
    engine_of(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_follow_the_weights(path: Path, tmp_path: Path) -> None:
    other = make_model(ARCHITECTURE, 1, tmp_path / "other")
    engine = loaded(path)
    first = generate(engine)
    load(engine, other)
    second = generate(engine)
    assert list(second) == list(generate(loaded(other)))
    assert list(second) != list(first)


@pytest.mark.parametrize("content", [None, '{"model_type": "unheard_of"}', '{"model_type": "vit"}'])
def test_what_is_no_language_model_is_refused(tmp_path: Path, copy: Path, content: str | None) -> None:
    if content is None:
        copy = tmp_path / "none"
    else:
        (copy / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"model.path={copy}(: its config| cannot be used to generate)"):
        engine_of(copy)


# what a batch says


def test_each_prompt_has_its_samples_in_order(path: Path) -> None:
    prompts = [PROMPTS[index] for index in (5, 2)]
    batch = generate(loaded(path), prompts, step=1, samples_per_prompt=3, version=(2, 7))
    assert [(item.step, item.prompt, item.sample) for item in batch] == [(1, p, s) for p in (5, 2) for s in range(3)]
    assert {item.version for item in batch} == {(2, 7)}


def test_samples_carry_the_tokens_of_their_prompt(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    for item in generate(loaded(path), MIXED):
        assert list(item.prompt_ids) == tokenizer(MIXED[item.prompt].text)["input_ids"]


@pytest.fixture(scope="module")
def long_batch(path: Path) -> SampleBatch:
    """Responses long enough for most to end by themselves, of a model that likes no token better than another."""
    return generate(loaded(path, response_length=60), samples_per_prompt=16)


def test_a_response_ends_with_the_first_end_token_or_at_the_limit(long_batch: SampleBatch) -> None:
    assert set(long_batch.finished.tolist()) == {True, False}
    for item in long_batch:
        assert 2 not in item.response_ids[:-1]
        assert (item.response_ids[-1] == 2) == item.finished
        assert item.finished or len(item.response_ids) == 60


def test_the_text_shows_every_token_but_the_end(long_batch: SampleBatch) -> None:
    shown = [*SPECIAL.values(), *CHARACTERS, *map(chr, range(0xE000 + 25, 0xE000 + 32))]
    for item in long_batch:
        ids = item.response_ids[:-1] if item.finished else item.response_ids
        assert item.text == "".join(shown[token] for token in ids)


def test_every_response_is_judged_with_its_own_prompt(path: Path) -> None:
    batch = generate(loaded(path, response_length=4))
    for item in batch:
        assert (item.reward, item.exact) == TASK.reward(PROMPTS[item.prompt], item.text, item.finished)
    assert batch.rewards.any()


def test_a_reward_that_fails_stops_the_run(path: Path) -> None:
    class Broken(CopyDigits):
        def reward(self, prompt: Prompt, text: str, finished: bool) -> RewardResult:
            return RewardResult(float("nan"))

    with pytest.raises(RunError, match=r"Broken\.reward, called for prompt 0 of step 3, returned nan"):
        generate(loaded(path), step=3, task=Broken(2, 0))


@pytest.mark.parametrize(
    "architecture",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 4},
        {"model_type": "gpt2", "intermediate_size": None, "num_key_value_heads": None},
        {"model_type": "qwen3_next", "num_experts": 0, "layer_types": ["linear_attention", "full_attention"]},
    ],
    ids=["full", "sliding", "half-sliding", "learnt-positions", "linear-attention"],
)
@pytest.mark.parametrize(("samples", "temperature"), [(1, 1.0), (3, 0.7)])
@pytest.mark.few(3)
def test_log_probs_are_those_that_a_trainer_computes(
    tmp_path: Path, architecture: dict[str, Any], samples: int, temperature: float
) -> None:
    fields = {name: value for name, value in (ARCHITECTURE | architecture).items() if value is not None}
    path = make_model(fields, 0, tmp_path / "model")
    engine = loaded(path, temperature=temperature, response_length=8, top_k=20, attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for item in generate(engine, MIXED, samples_per_prompt=samples):
        ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
        with torch.inference_mode():
            log_probs = (model(ids).logits[0, len(item.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(item.response_ids)[:, None])[:, 0]
        assert item.log_probs == pytest.approx(expected.tolist(), abs=1e-5)


# repeatability


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_same_call_gives_the_same_bytes(path: Path, dtype: str) -> None:
    engine = loaded(path, dtype=dtype)
    first = generate(engine)
    generate(engine, step=2)
    assert pickle.dumps(generate(engine)) == pickle.dumps(first)
    assert pickle.dumps(generate(loaded(path, dtype=dtype))) == pickle.dumps(first)


def same_samples(batch: SampleBatch, expected: SampleBatch) -> None:
    """The same tokens and rewards, and log-probs that differ by rounding only: matrix kernels depend on the batch."""
    assert [item.response_ids for item in batch] == [item.response_ids for item in expected]
    assert batch.rewards.tolist() == expected.rewards.tolist()
    np.testing.assert_allclose(batch.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_make_the_samples_that_one_would_make(path: Path, replicas: int) -> None:
    whole = generate(loaded(path), MIXED)
    parts = [generate(loaded(path), [MIXED[i] for i in block]) for block in assign(len(MIXED), replicas)]
    same_samples(SampleBatch.concatenate(parts).sorted(), whole)


@pytest.mark.parametrize("batch_size", [1, 7, 20])
def test_the_batch_size_changes_no_sample(path: Path, batch_size: int) -> None:
    same_samples(generate(loaded(path, batch_size=batch_size), MIXED), generate(loaded(path), MIXED))


def test_more_samples_leave_the_first_ones_as_they_were(path: Path) -> None:
    many = generate(loaded(path), samples_per_prompt=6)
    same_samples(many.take(np.flatnonzero(many.samples < 2)), generate(loaded(path), samples_per_prompt=2))


@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 2}])
def test_another_seed_or_step_gives_other_samples(path: Path, change: dict[str, int]) -> None:
    engine = loaded(path, seed=change.get("seed", 0))
    other = generate(engine, step=change.get("step", 1))
    assert other.responses.ids.tolist() != generate(loaded(path)).responses.ids.tolist()


def test_at_temperature_0_all_samples_are_the_most_likely_response(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for item in generate(loaded(path, temperature=0.0), samples_per_prompt=2):
        ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
        with torch.inference_mode():
            best = model(ids).logits[0, len(item.prompt_ids) - 1 : -1].argmax(-1)
        assert list(item.response_ids) == best.tolist()


# what comes with the model


def test_a_model_may_have_several_end_tokens(copy: Path) -> None:
    edit(copy / "generation_config.json", eos_token_id=[2, 9, 10])
    batch = generate(loaded(copy, response_length=30))
    ends = {item.response_ids[-1] for item in batch if item.finished}
    assert ends == {2, 9, 10}
    assert not any({2, 9, 10} & set(item.response_ids[:-1]) for item in batch)


def test_sampling_settings_of_the_model_are_not_those_of_the_run(path: Path, copy: Path) -> None:
    edit(copy / "generation_config.json", repetition_penalty=5.0, min_new_tokens=3, temperature=0.1, do_sample=True)
    assert list(generate(loaded(copy, response_length=9))) == list(generate(loaded(path, response_length=9)))


def test_without_a_generation_config_the_tokenizer_names_the_end(path: Path, copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    assert list(generate(loaded(copy))) == list(generate(loaded(path)))


def test_a_model_without_an_end_token_is_refused(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit(copy / "config.json", eos_token_id=None)
    edit(copy / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="names no end-of-sequence token"):
        engine_of(copy)


CHAT = "{% for message in messages %}{{ message['content'] }}={% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_a_chat_goes_through_the_template_of_the_tokenizer(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", chat_template=CHAT)
    messages = ({"role": "system", "content": "1"}, {"role": "user", "content": "61"})
    (item,) = generate(loaded(copy), [Prompt(index=0, text="61", messages=messages, answer="61")], samples_per_prompt=1)
    assert AutoTokenizer.from_pretrained(copy).decode(item.prompt_ids).lstrip(SPECIAL["bos_token_id"]) == "1=61=>"


# prompts that cannot be used


def refused(engine: HFEngine, prompt: Prompt) -> str:
    with pytest.raises(RunError) as caught:
        generate(engine, [PROMPTS[0], prompt], step=5)
    message = str(caught.value)
    assert message.startswith(f"prompt {prompt.index} of step 5 ")
    return message.removeprefix(f"prompt {prompt.index} of step 5 ")


def test_a_chat_needs_a_template(path: Path) -> None:
    prompt = Prompt(index=1, text="61", messages=({"role": "user", "content": "61"},))
    assert "the tokenizer has no chat template" in refused(loaded(path), prompt)


def test_characters_without_a_token_are_named(path: Path) -> None:
    wrong = refused(loaded(path), Prompt(index=1, text="6 x x 1"))
    assert wrong == "cannot be tokenised: the tokenizer has no token for ' ', 'x'"


def test_characters_that_become_the_unknown_token_are_named(copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = "%"
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit(copy / "tokenizer_config.json", unk_token="%")
    assert (
        refused(loaded(copy), Prompt(index=1, text="6x")) == "cannot be tokenised: the tokenizer has no token for 'x'"
    )


def test_an_unknown_token_that_begins_each_text_is_no_fault_of_a_prompt(copy: Path) -> None:
    begin = SPECIAL["bos_token_id"]
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = begin
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit(copy / "tokenizer_config.json", unk_token=begin, chat_template=begin + CHAT)
    engine = loaded(copy)
    chat = Prompt(index=2, text="5", messages=({"role": "user", "content": "5"},), answer="5")
    written = Prompt(index=3, text=f"4{begin}4", answer="4")
    batch = generate(engine, [*PROMPTS[:2], chat, written], samples_per_prompt=1)
    assert [item.prompt_ids[0] for item in batch] == [1, 1, 1, 1]
    wrong = "cannot be tokenised: the tokenizer has no token for 'x'"
    assert refused(engine, Prompt(index=1, text="6x")) == wrong
    assert refused(engine, Prompt(index=1, text="6x", messages=({"role": "user", "content": "6x"},))) == wrong


def test_a_prompt_must_have_a_token(copy: Path) -> None:
    edit(copy / "tokenizer.json", post_processor=None)
    assert refused(loaded(copy), Prompt(index=1, text="")) == "has no token"


def test_a_prompt_may_be_as_long_as_the_task_allows_and_no_longer(path: Path) -> None:
    engine = loaded(path, prompt_length=6)
    assert len(generate(engine, [Prompt(index=0, text="12345", answer="1")])) == 4
    wrong = refused(engine, Prompt(index=1, text="123456", answer="1"))
    assert wrong == "has 7 tokens; task.prompt_length allows 6"


def test_prompt_and_response_must_fit_the_positions_of_the_model(path: Path) -> None:
    engine = loaded(path)
    assert len(generate(engine, [Prompt(index=0, text="1" * 124, answer="1")])) == 4
    wrong = refused(engine, Prompt(index=1, text="1" * 125, answer="1"))
    assert "has 126 tokens; with a response of 3 that is more than the 128 positions" in wrong


# validation


def test_a_validation_has_random_numbers_and_a_temperature_of_its_own_and_changes_nothing_of_training(
    path: Path,
) -> None:
    engine = loaded(path)
    trained = generate(engine)
    validated = generate(engine, drawing=Drawing(purpose=Purpose.VALIDATION))
    assert validated.texts != trained.texts
    assert list(validated) == list(generate(engine, drawing=Drawing(purpose=Purpose.VALIDATION, temperature=1.0)))
    greedy = generate(engine, drawing=Drawing(purpose=Purpose.VALIDATION, temperature=0.0))
    assert greedy.texts == generate(loaded(path, temperature=0.0)).texts
    assert list(generate(engine)) == list(trained)
