"""Secrets in output."""

from __future__ import annotations

import pytest

from trinity_sync.host.masking import MASK, hide, hide_typed, is_secret, masked, masked_override, shown, without_hidden


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "key",
        "secret",
        "password",
        "api_key",
        "apiKey",
        "APIKey",
        "apikey",
        "WANDB_API_KEY",
        "hf_token",
        "aws_secret_access_key",
        "authToken",
        "client_secret",
        "Authorization",
        "sftp_passwd",
        "passphrase",
        "pkey",
        "account-key",
        "connection_string",
        "credentials",
        "api_keys",
    ],
)
def test_a_name_with_the_word_of_a_secret_is_one(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "max_tokens",
        "token_ids",
        "eos_token",
        "pad_token_id",
        "keyword",
        "keep",
        "key_prefix",
        "monkey",
        "prompt_key",
        "num_key_value_heads",
        "balance_tokens",
        "reward_fn_key",
        "tokens",
        "keys",
        "keep_best",
        "name",
        "messages_key",
        "enable_thinking_key",
        "passage",
    ],
)
def test_a_name_that_only_looks_like_one_is_none(name: str) -> None:
    assert not is_secret(name)


def test_settings_are_masked_however_deep_and_references_stay() -> None:
    settings = {
        "name": "run",
        "max_tokens": 4,
        "mirror": "sftp://me:p@ss@host/far?token=abc&part=1",
        "options": {"secret": "one", "client": [{"apiKey": "two"}, {"region": "eu"}], "password": {"deep": ["three"]}},
        "wandb": {"api_key": "${oc.env:KEY}", "hf_token": "${oc.env:HF,default}", "token": None, "key": True},
    }
    assert masked(settings) == {
        "name": "run",
        "max_tokens": 4,
        "mirror": "sftp://me:***@host/far?token=***&part=1",
        "options": {"secret": MASK, "client": [{"apiKey": MASK}, {"region": "eu"}], "password": {"deep": [MASK]}},
        "wandb": {"api_key": "${oc.env:KEY}", "hf_token": MASK, "token": None, "key": True},
    }


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("tracker.wandb.api_key=abc", "tracker.wandb.api_key=***"),
        ("+task.judge.token='a b'", "+task.judge.token=***"),
        ("task.api_key=${oc.env:KEY}", "task.api_key=${oc.env:KEY}"),
        ("task.api_key=null", "task.api_key=null"),
        ("checkpoint.mirror_options={secret: abc, key: 'x,y', anon: false}", None),
        ("checkpoint.mirror_options={client:{password:[a,b],user:me},token:t}", None),
        ("checkpoint.mirror=sftp://user:word@host/far", "checkpoint.mirror=sftp://user:***@host/far"),
        ("trainer.max_tokens=12", "trainer.max_tokens=12"),
        ("--config-name=other", "--config-name=other"),
        ("name=a,b", "name=a,b"),
    ],
)
def test_a_command_line_is_masked(typed: str, told: str | None) -> None:
    expected = {
        "checkpoint.mirror_options={secret: abc, key: 'x,y', anon: false}": (
            "checkpoint.mirror_options={secret: ***, key: ***, anon: false}"
        ),
        "checkpoint.mirror_options={client:{password:[a,b],user:me},token:t}": (
            "checkpoint.mirror_options={client:{password:***,user:me},token:***}"
        ),
    }
    assert masked_override(typed) == (told or expected[typed])


def test_a_password_with_an_at_sign_is_not_shown() -> None:
    assert shown("cannot reach sftp://me:p@ss@host/x and a@b") == "cannot reach sftp://me:***@host/x and a@b"


def test_an_error_does_not_tell_the_secrets_of_the_process() -> None:
    hide({"tracker": {"x": {"api_key": "abcdef-123"}}, "url": "http://me:hunter-22@host"})
    assert without_hidden("401 for abcdef-123 of hunter-22") == "401 for *** of ***"
    assert without_hidden("me at host") == "me at host"


def test_what_was_typed_as_a_secret_is_hidden_from_then_on() -> None:
    hide_typed(["+tracker.x.api_key='typed-secret'", "a={b: {token: deep-token}}", "task.key=${oc.env:NAME}", "-m"])
    assert without_hidden("typed-secret, deep-token and ${oc.env:NAME}") == "***, *** and ${oc.env:NAME}"


@pytest.mark.parametrize("word", ["run", "an-1", "another", "checkpoint"])
def test_a_secret_that_could_be_a_word_hides_no_words(word: str) -> None:
    hide({"api_key": word})
    assert without_hidden(f"the {word}") == f"the {word}"
