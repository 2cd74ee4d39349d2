"""The look at a task's rows before a run starts, as the driver has it: with the process that tokenises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.tasks.chat import TEMPLATE, chat_tokenizer, said
from trinity_sync.config import compose, typed
from trinity_sync.errors import ConfigError, RunError
from trinity_sync.launch import row_scan
from trinity_sync.launch.row_scan import RowCounts, ScannedTask, scanned_task

SHORT, LONG, LONGER = "61=", "123456789=", "1234567890123="
"""Of 4, 11 and 15 tokens."""


def scanned(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> ScannedTask:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("task.prompt_length=10", "task.response_length=4", *overrides)
    return scanned_task(typed(compose(["task=jsonl", f"task.path={path}", *given])))


def asked(*prompts: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": "7"} for prompt in prompts]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has loaded all that it takes."""

    def ask(request: Any, path: str) -> Any:
        return row_scan._look(request, lambda done: None)

    monkeypatch.setattr(row_scan, "_ask", ask)


@pytest.mark.all
def test_rows_that_fit_are_counted(tmp_path: Path) -> None:
    assert scanned(tmp_path, asked(SHORT, "1=")).counts == RowCounts(2, 0, 4, "refuse")


def test_the_first_that_is_too_long_is_named_and_how_many_there_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        scanned(tmp_path, asked(SHORT, LONG, SHORT, LONGER))
    assert str(refused.value) == (
        f"{tmp_path}/rows.jsonl:2 has 11 tokens; task.prompt_length allows 10. 2 of 4 rows are too long, the longest "
        "has 15 tokens; set task.prompt_length=15, task.too_long=filter to leave them out, or task.too_long=truncate "
        "to cut their left end"
    )
    assert not capfd.readouterr().err, "nothing else is said"


@pytest.mark.usefixtures("here")
def test_what_is_filtered_is_given_out_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, counts, _ = scanned(tmp_path, asked(SHORT, LONG, "7=", LONGER), "task.too_long=filter", "task.shuffle=false")
    assert counts == RowCounts(4, 2, 15, "filter")
    assert [prompt.text for prompt in task.prompts(1, 4)] == [SHORT, "7=", SHORT, "7="]
    assert "2 of 4 rows of" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_with_truncate_all_rows_stay(tmp_path: Path) -> None:
    task, counts, _ = scanned(tmp_path, asked(SHORT, LONG), "task.too_long=truncate", "task.shuffle=false")
    assert counts == RowCounts(2, 1, 11, "truncate")
    assert [prompt.text for prompt in task.prompts(1, 2)] == [SHORT, LONG]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("prompt", "settings", "told"),
    [
        ("6x=", [], r"rows\.jsonl:2 cannot be tokenised: the tokenizer has no token for 'x'"),
        ("6x=", ["task.too_long=filter"], r"rows\.jsonl:2 cannot be tokenised: the tokenizer has no token for 'x'"),
        (said("61="), [], r"rows\.jsonl:2 is a chat, but the tokenizer has no chat template"),
        (
            LONG,
            ["task.prompt_length=500", "task.response_length=120"],
            "response of 120 that is more than the 128 ",
        ),
        (SHORT, ["task.response_length=200"], "task.response_length is 200, which leaves no room for a prompt"),
        (
            SHORT,
            ["task.chat_template.quiet=true"],
            "task.chat_template is given, but the model's tokenizer has no chat",
        ),
        (
            LONG,
            ["task.prompt_length=2", "task.too_long=filter"],
            "all 2 rows are too long; task.prompt_length allows 2",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, prompt: Any, settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        scanned(tmp_path, asked("7=", prompt), *settings)


def test_the_tokenizer_is_that_of_the_model(tmp_path: Path) -> None:
    """With its template, and what is given to that; the argument that it does not read is refused by its name."""
    model = chat_model(tmp_path)
    chats = asked(said("61="), said("7="))
    assert scanned(tmp_path, chats, model, "task.prompt_length=99").counts == RowCounts(2, 0, 13, "refuse")
    quiet = "task.chat_template.enable_thinking=false"
    assert scanned(tmp_path, chats, model, "task.prompt_length=99", quiet).counts == RowCounts(2, 0, 15, "refuse")
    with pytest.raises(
        ConfigError, match=r"^task\.chat_template\.enable_thinkin is not an argument that .*: enable_thinking$"
    ):
        scanned(tmp_path, chats, model, "task.chat_template.enable_thinkin=false")


def chat_model(folder: Path) -> str:
    model = folder / "model"
    chat_tokenizer(TEMPLATE).save_pretrained(model)
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 128})
    )
    return f"model.path={model}"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("task", "row", "longest"),
    [
        ("pairs", {"prompt": SHORT, "response": "61"}, 7),
        ("conversations", {"messages": said("61=", "61")}, 16),
    ],
)
def test_pairs_and_conversations_are_looked_through_too(
    tmp_path: Path, task: str, row: dict[str, Any], longest: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    given = ["algorithm=sft", f"task={task}", f"task.path={path}", chat_model(tmp_path)]
    assert scanned_task(typed(compose([*given, f"task.max_length={longest}"]))).counts == RowCounts(
        1, 0, longest, "refuse"
    )
    with pytest.raises(
        ConfigError, match=rf"rows\.jsonl:1 has {longest} tokens; task\.max_length allows {longest - 1}"
    ):
        scanned_task(typed(compose([*given, f"task.max_length={longest - 1}"])))


@pytest.mark.usefixtures("here")
def test_without_a_tokenizer_here_rows_are_left_to_those_who_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model.path={tmp_path / 'elsewhere'}"
    assert scanned(tmp_path, asked(LONG), model).counts is None
    assert "the rows of" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"by which task\.too_long=filter would find the rows"):
        scanned(tmp_path, asked(LONG), model, "task.too_long=filter")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("kept", "config", "told"),
    [
        ("*", {"max_position_embeddings": None}, "its config.json cannot be read: .*'max_position_embeddings'"),
        ("config.json", {}, " has no tokenizer; copy its files"),
        ("[ct]*g.json", {}, "its tokenizer cannot be read: "),
        ("[ct]*g.json", {"tokenizer_class": "Qwen2Tokenizer"}, "its tokenizer has no tokens; copy all of its files"),
        ("[ct]*", {"model_type": "none"}, "its config.json cannot be read: "),
    ],
)
def test_a_model_that_is_here_and_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, kept: str, config: dict[str, object], told: str
) -> None:
    chosen = chat_model(tmp_path)
    folder = Path(chosen.removeprefix("model.path="))
    for path in set(folder.iterdir()) - set(folder.glob(kept)):
        path.unlink()
    for path in folder.glob("*config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ConfigError, match=rf"^model\.path={folder}:? ?{told}") as refused:
        scanned(tmp_path, asked(SHORT), chosen)
    assert "\n" not in str(refused.value)


def test_a_model_that_is_here_needs_a_tokenizer_for_a_task_without_a_file_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path={tmp_path} has no tokenizer; copy its files"):
        scanned_task(typed(compose([f"model.path={tmp_path}"])))


@pytest.mark.usefixtures("here")
def test_a_value_that_rewards_do_not_get_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    when = pyarrow.array([0, 2**62, 2**62], pyarrow.timestamp("us"))
    table = pyarrow.table({"prompt": [SHORT] * 3, "answer": ["7"] * 3, "when": when})
    parquet.write_table(table, tmp_path / "rows.parquet")
    given = [f"task.path={tmp_path}/rows.parquet", "task.prompt_length=10", "task.response_length=4"]
    found = scanned_task(typed(compose(["task=jsonl", *given])))
    assert found.counts == RowCounts(3, 0, 4, "refuse")
    told = [line for line in capsys.readouterr().err.splitlines() if "'when'" in line]
    assert len(told) == 1
    assert "rows.parquet: row 2: the column 'when' cannot be read, and rewards do not get it: date value" in told[0]


def test_a_model_without_an_end_is_refused_also_where_the_task_has_no_file(tmp_path: Path) -> None:
    model = chat_model(tmp_path)
    edit(tmp_path / "model" / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match=r"^model\.path=.* names no end-of-sequence token"):
        scanned_task(typed(compose([model])))


@pytest.mark.usefixtures("here")
def test_ends_that_differ_are_told_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = chat_model(tmp_path)
    edit(tmp_path / "model" / "config.json", eos_token_id=5)
    scanned_task(typed(compose([model])))
    assert "note: the model names its end-of-sequence tokens in several ways (" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"attn_logit_softcapping": 2.0, "model_type": "gemma2"}, r"^model\.attn_implementation is sdpa, which leaves"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, r"^model\.path is .*, whose config\.json has archit"),
    ],
    ids=["attention", "class"],
)
def test_the_config_of_a_model_is_looked_at_where_transformers_reads_it(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    model = chat_model(tmp_path)
    edit(tmp_path / "model" / "config.json", **fields)
    with pytest.raises(ConfigError, match=told):
        scanned_task(typed(compose([model])))


@pytest.mark.usefixtures("here")
def test_heads_that_vllm_does_not_take_are_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scan, "accelerator_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"^explorer\.kind: vLLM cannot run a model with heads of 24 on a CPU"):
        scanned_task(typed(compose(["explorer=vllm", "model.architecture.head_dim=24"])))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("explorer", ["vllm", "vllm_server"])
def test_a_class_that_vllm_would_choose_otherwise_is_refused(tmp_path: Path, explorer: str) -> None:
    model = chat_model(tmp_path)
    edit(tmp_path / "model" / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"^explorer\.kind: vLLM goes by architectures \[LlamaForCausalLM\]"):
        scanned_task(typed(compose([model, f"explorer={explorer}"])))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_task_without_a_file_is_not_looked_through() -> None:
    task, counts, validation = scanned_task(typed(compose([])))
    assert (type(task).__name__, counts, validation) == ("CopyDigits", None, ())
    assert scanned_task(typed(compose(["workload=bytes"]))) == (None, None, ())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("policy", ["refuse", "filter"])
def test_what_a_run_validates_on_is_looked_through_as_well(tmp_path: Path, policy: str) -> None:
    held_out = tmp_path / "val.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in asked(LONG, "1=")))
    given = [f"task.validation.path={held_out}", f"task.too_long={policy}"]
    if policy == "refuse":
        with pytest.raises(ConfigError, match=r"val\.jsonl:1 has 11 tokens"):
            scanned(tmp_path, asked(SHORT), *given)
    else:
        found = scanned(tmp_path, asked(SHORT), *given)
        assert [prompt.text for prompt in found.validation] == ["1="]
        assert found.counts == RowCounts(1, 0, 4, "filter")


def test_a_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(module: str, log: Path | None, message_s: int) -> Any:
        child = start_child(module, log, message_s)
        child.end()
        return child

    start_child = row_scan.start_child
    monkeypatch.setattr(row_scan, "start_child", dying)
    with pytest.raises(RunError, match=r"the process that checks the rows of .*rows\.jsonl has ended \(-9\)"):
        scanned(tmp_path, asked(SHORT))


def test_the_driver_loads_nothing_heavy_for_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": SHORT, "answer": "7"}) + "\n")
    script = f"""
import sys
from trinity_sync.config import compose, typed
from trinity_sync.launch.row_scan import scanned_task
assert scanned_task(typed(compose(["task=jsonl", "task.path={path}", "task.response_length=4"]))).counts.rows == 1
print(sorted({{"torch", "transformers", "ray", "verl"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
