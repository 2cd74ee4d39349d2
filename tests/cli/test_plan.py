"""`trinity-sync plan`: its formulas against the measurements of benchmarks/results, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT
from trinity_sync.cli import main as cli
from trinity_sync.cli.plan import CONSTANTS, MEMORY, MODELS, Inputs, figures, memory, transfers, value
from trinity_sync.launch import machine

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "plan.md").read_text()
BIG = ("--nodes", "16", "--gpus", "8", "--explorers", "32", "--model", "qwen3-235b-a22b", "--links", "400")
HERE = Inputs(nodes=1, explorers=1, model_bytes=10**9, tensors=300, cores=2)
FAR = Inputs(nodes=4, explorers=6, model_bytes=10**10, tensors=300, link=125e6)
CARDS = Inputs(nodes=16, explorers=8, model_bytes=MODELS["qwen3-235b-a22b"][0], tensors=300, link=5e10, gpus=8, tp=8)
MODES = ("memory", "nccl", "checkpoint")


def seconds(given: Inputs, mode: str, *steps: str, encoding: str = "full", **measured: float) -> float:
    """The seconds of a sync, or of some of its steps."""
    constants = {**CONSTANTS, **{name: CONSTANTS[name]._replace(value=one) for name, one in measured.items()}}
    found = next(one for one in transfers(given, constants) if (one.mode, one.encoding) == (mode, encoding))
    return sum(step.seconds for step in found.steps if not steps or step.name in steps)


# ---- against measurements


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def planned_and_measured() -> Iterator[tuple[str, float, float]]:
    """What was measured, of which kind, and what the plan says. Copies are those measured beside it."""
    for run in results("sync")["runs"]:
        found = run["results"].get("model", {})
        for mode, kind in (("memory", ""), ("nccl", ""), ("checkpoint", ""), ("memory", "/one rank")):
            if (measured := found.get(f"{mode}{kind}/total_s")) is None:
                continue
            given = HERE._replace(model_bytes=found["wire_bytes"], tensors=found["tensors"], ranks=1 if kind else 2)
            copy = found["wire_bytes"] / found["one_copy_s"]["median"]
            yield f"one node, {mode}", seconds(given, mode, copy=copy), measured["median"]
    for point in results("models")["curves"]:
        if point["curve"] == "lora":
            continue
        counts = {"explorers": "explorers", "ranks": "ranks"}
        given = (
            HERE._replace(model_bytes=point["bytes"], **{counts[point["curve"]]: int(point["value"])})
            if (point["curve"] in counts)
            else HERE._replace(model_bytes=point["bytes"])
        )
        planned = seconds(given, "memory", copy=point["memcpy_gb_s"] * 1e9)
        yield "models of real shapes, memory", planned, point["publish_s"] + point["load_s"]
    for modes in results("sync_engines")["results"].values():
        for mode in MODES:
            found = modes[mode]
            given = HERE._replace(model_bytes=found["wire_bytes"], ranks=2)
            copy = found["wire_bytes"] / found["one_copy_s"]["median"]
            measured = found["publish_s"]["median"] + found["load_s"]["median"]
            yield f"with engines, {mode}", seconds(given, mode, copy=copy), measured
    for found in results("checkpoint")["results"].values():
        given = HERE._replace(model_bytes=found["state_bytes"] // 6, ranks=2)
        yield "full save, files", seconds(given, "save", "flush state"), found["eager/write_s"]["median"]
    for run in results("sync")["runs"]:
        if found := run["results"].get("control plane"):
            sizes = {"E": found["explorers"], "N": found["nodes"], "call": CONSTANTS["call"].value}
            yield "control plane", value("(3 * E + N + 4) * call", sizes), found["actor/total_s"]["median"]


def between_nodes() -> Iterator[tuple[str, float, float]]:
    """The table of docs/performance.md: 512 MiB in two parts at 1 Gb/s, as a ratio to bytes / rate."""
    text = (ROOT / "docs" / "performance.md").read_text().split("### Between nodes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| [\d.]+ \| ([\d.]+) \|", text, flags=re.MULTILINE)
    assert len(rows) == 3
    for nodes, ratio in rows:
        given = FAR._replace(nodes=int(nodes) + 1, explorers=int(nodes), model_bytes=512 << 20)
        yield "chain between nodes", seconds(given, "memory", "bring"), float(ratio) * given.model_bytes / given.link
    whole = re.search(r"(\d+) MB, two explorers on the other node[^`]* took ([\d.]+) x bytes / rate", text)
    assert whole is not None
    given = FAR._replace(nodes=2, explorers=2, model_bytes=int(whole[1]) * 10**6)
    measured = float(whole[2]) * given.model_bytes / given.link
    yield "load over a link", seconds(given, "memory", "bring", "load"), measured


def stated() -> dict[str, tuple[float, float]]:
    """The least and the most of planned / measured, as the table of docs/plan.md has them."""
    rows = re.findall(r"^\| ([a-z][^|]*) \| [^|]*\| ([\d.]+) to ([\d.]+) \|", PAGE, flags=re.MULTILINE)
    return {name: (float(least), float(most)) for name, least, most in rows}


def test_what_was_measured_is_planned_as_the_page_says() -> None:
    ratios: dict[str, list[float]] = {}
    for kind, planned, measured in [*planned_and_measured(), *between_nodes()]:
        ratios.setdefault(kind, []).append(planned / measured)
    assert {kind: (round(min(found), 2), round(max(found), 2)) for kind, found in ratios.items()} == stated()


def test_the_page_explains_every_size_and_constant() -> None:
    sizes = figures(FAR).keys() - CONSTANTS.keys()
    assert {name for name in [*CONSTANTS, *sizes, "B"] if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize("name", [name for name, one in CONSTANTS.items() if ".json: " in one.source])
def test_the_file_of_a_constant_exists(name: str) -> None:
    assert (ROOT / CONSTANTS[name].source.partition(": ")[0]).is_file()


@pytest.mark.parametrize(
    ("name", "file", "measured"),
    [
        ("copy", "sync", lambda runs: one_of(runs)["wire_bytes"] / one_of(runs)["one_copy_s"]["median"]),
        ("digest", "sync", lambda runs: one_of(runs)["wire_bytes"] / one_of(runs)["memory/seal_s"]["median"] / 2),
        ("gloo", "sync", lambda runs: one_of(runs)["wire_bytes"] / one_of(runs)["nccl/raw_s"]["median"]),
        ("disk", "checkpoint", lambda found: found["results"]["fsdp2"]["state_bytes"] / 1.4442624709990923),
        ("to_card", "gpu", lambda found: found["steps"]["load: page-locked slot"]["gb_s"] * 1e9),
        ("from_card", "gpu", lambda found: found["steps"]["stage: fp32 cast on the device"]["gb_s"] * 1e9),
        ("driver", "main_job", lambda found: found["median"]["peak_rss/driver"]),
    ],
)
def test_a_constant_is_the_one_of_its_file(name: str, file: str, measured: Any) -> None:
    assert CONSTANTS[name].value == pytest.approx(measured(results(file)), rel=0.01)


def one_of(runs: Mapping[str, Any]) -> Any:
    return runs["runs"][0]["results"]["model"]


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_the_size_of_its_shapes(name: str) -> None:
    fields = json.loads((ROOT / "trinity_sync" / "models" / "published" / f"{name}.json").read_text())
    hidden, heads, keys, dim = (
        fields[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    experts = fields.get("num_experts", 0)
    width = fields["moe_intermediate_size"] if experts else fields["intermediate_size"]
    layer = 2 * hidden * dim * (heads + keys) + 2 * (hidden + dim) + 3 * hidden * width * (experts or 1)
    layer += experts * hidden
    tables = 1 if fields["tie_word_embeddings"] else 2
    layers = fields["num_hidden_layers"]
    elements = layers * layer + tables * fields["vocab_size"] * hidden + hidden
    assert tuple(MODELS[name]) == (2 * elements, layers * (9 + 3 * experts if experts else 11) + 1 + tables)


@pytest.mark.all  # imports transformers
def test_the_shapes_of_a_config_have_the_published_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ROOT / "trinity_sync" / "models" / "published" / "qwen3-0.6b.json"
    (tmp_path / "config.json").write_text(shapes.read_text())
    for model in (tmp_path, tmp_path / "config.json"):
        assert cli.main(["plan", "--nodes=1", "--gpus=0", "--explorers=1", f"--model={model}", "--json"]) == 0
        sizes = json.loads(capsys.readouterr().out)["sizes"]
        assert [sizes["V"], sizes["T"]] == MODELS["qwen3-0.6b"]


# ---- properties


@pytest.mark.parametrize("given", [HERE, FAR, CARDS], ids=["here", "far", "cards"])
def test_more_bytes_never_take_less_time(given: Inputs) -> None:
    for one, larger in zip(transfers(given), transfers(given._replace(model_bytes=given.model_bytes * 3)), strict=True):
        assert larger.seconds > one.seconds
        assert larger.moved >= one.moved


@pytest.mark.parametrize("given", [FAR, CARDS], ids=["far", "cards"])
def test_slower_links_never_take_less_time(given: Inputs) -> None:
    times = [[one.seconds for one in transfers(given._replace(link=link))] for link in (1e6, 1e8, 1e10, math.inf)]
    assert all(slow >= fast for slow, fast in zip(times[0], times[1], strict=True))
    assert all(slow >= fast for slow, fast in zip(times[1], times[2], strict=True))
    assert all(slow >= fast for slow, fast in zip(times[2], times[3], strict=True))


def test_more_nodes_never_move_fewer_bytes() -> None:
    for cards in (0, 8):
        moved = dict.fromkeys(MODES, 0.0)
        for nodes in (1, 2, 3, 5, 9):
            given = FAR._replace(nodes=nodes, explorers=4, gpus=cards, ranks=4)
            for one in transfers(given):
                if one.encoding == "full" and one.mode in moved:
                    assert one.moved >= moved[one.mode]
                    moved[one.mode] = one.moved


def test_a_chain_sends_a_version_to_each_node_once() -> None:
    found = {(one.mode, one.encoding): one.moved for one in transfers(FAR)}
    assert found["memory", "full"] == 3 * FAR.model_bytes  # nodes
    assert found["nccl", "full"] == 6 * FAR.model_bytes  # explorers


def test_on_one_node_nothing_travels_and_there_are_no_deltas() -> None:
    found = {(one.mode, one.encoding): one for one in transfers(HERE)}
    assert {encoding for _, encoding in found} == {"full"}
    assert found["memory", "full"].moved == 0
    assert "bring" not in [step.name for step in found["memory", "full"].steps]


def test_deltas_pay_on_slow_links_alone() -> None:
    slow, fast = FAR, FAR._replace(link=1e12)
    assert seconds(slow, "memory", encoding="delta") < seconds(slow, "memory")
    assert seconds(fast, "memory", encoding="delta", tcp=1e12) > seconds(fast, "memory", tcp=1e12)


def test_ranks_share_the_weights_and_explorers_hold_them() -> None:
    found = memory(figures(CARDS))
    assert found["trainer rank, its device"] == 8 * CARDS.model_bytes / 64
    assert found["explorer, each device"] == pytest.approx(CARDS.model_bytes / 8, rel=0.001)
    assert memory(figures(HERE)).keys() < MEMORY.keys()


@pytest.mark.parametrize(
    ("given", "ranks", "nodes"),
    [
        (CARDS, 64, 8),
        (CARDS._replace(explorers=32, tp=1), 96, 12),
        (CARDS._replace(nodes=2, explorers=3, tp=3), 5, 1),  # an explorer is beside the ranks
        (CARDS._replace(nodes=1, explorers=4, tp=1), 4, 1),
        (FAR, 2, 1),
    ],
)
def test_ranks_take_whole_nodes_or_what_is_left_of_one(given: Inputs, ranks: int, nodes: int) -> None:
    found = figures(given)
    assert (found["R"], found["N"]) == (ranks, nodes)


def test_a_link_below_the_least_rate_exceeds_the_limit() -> None:
    def problems(**settings: float) -> str:
        given = FAR._replace(link=1e6, **settings)
        return " ".join(step.problem for one in transfers(given) for step in one.steps if step.problem)

    told = problems()
    assert re.search(
        r"bring takes 10,4\d\d s, and its limit is 860 s \(sync.timeout_s=60, .* sync.min_rate_mbps=100", told
    )
    assert "set sync.encoding=delta, or lower sync.min_rate_mbps" in told
    assert "checkpoint.dir on a faster disk" in told
    assert problems(min_rate_mbps=1.0) == ""


# ---- the command


def test_the_output_has_each_figure_with_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *BIG, "--tp=1"]) == 0
    lines = [re.sub(r" {2,}", "  ", line) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "memory  full  470 GB  1.88 TB  5 min 31 s  152 ms  bring, 5 min 07 s",
        "memory  full  bring  5 min 07 s  (framing * V + (M - 1) * min(4, R) * piece) / min(L, tcp)",
        "explorer, each device  470 GB  V / TP + buckets",
        "tcp  1.6 GB/s  docs/performance.md#between-nodes: 1, without a limit",
        "note: explorer, each device: 470 GB, and a GPU has 80 GB (--gpu-gb); give more --tp, with enough GPUs",
        "note: deltas pay with sync=memory, checkpoint",
        "V  470,187,269,120  bytes of a version, in bf16",
    ):
        assert line in lines


def test_the_json_has_what_computes_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *BIG, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    known = {**found["sizes"], **{name: one["value"] for name, one in found["constants"].items()}}
    for one in found["transfers"]:
        for step in one["steps"]:
            assert value(step["formula"], {**known, "B": one["nbytes"]}) == step["seconds"]
        assert one["seconds"] == pytest.approx(sum(step["seconds"] for step in one["steps"]))
    assert all(value(one["formula"], known) == one["bytes"] for one in found["memory"])


def test_measured_constants_replace_the_documented_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speeds.json"
    monkeypatch.setattr(machine, "_PROBE_BYTES", 8 << 20)
    assert cli.main(["doctor", "--measure", str(file)]) in (0, 1)
    speeds = json.loads(file.read_text())
    assert speeds.keys() == {"copy", "digest", "tcp", "disk"}
    assert all(1e6 < rate < 1e12 for rate in speeds.values())
    told = capsys.readouterr().out
    assert all(f"measured {name} " in told for name in speeds)
    assert cli.main(["plan", *BIG, "--measured", str(file), "--json"]) == 0
    constants = json.loads(capsys.readouterr().out)["constants"]
    assert constants["tcp"] == {"value": speeds["tcp"], "unit": "B/s", "source": str(file)}
    assert constants["ray"]["value"] == CONSTANTS["ray"].value


def test_a_folder_has_the_sizes_of_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)}, tmp_path / "model.safetensors")
    assert cli.main(["plan", "--nodes=1", "--gpus=0", "--explorers=1", f"--model={tmp_path}", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert (sizes["V"], sizes["T"]) == (2 * 17, 2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--nodes", "0"), "--nodes: '0' is not a whole number from 1 to 1e9"),
        (("--nodes", "1.5"), "--nodes: '1.5' is not a whole number"),
        (("--gpus", "-1"), "--gpus: '-1' is not a whole number from 0"),
        (("--explorers", "many"), "--explorers: 'many' is not a whole number"),
        (("--links", "nan"), "--links: 'nan' is not a number above 0"),
        (("--links", "0"), "--links: '0' is not a number above 0"),
        (("--links", "inf"), "--links: 'inf' is not a number above 0"),
        (("--min-rate-mbps", "-5"), "--min-rate-mbps: '-5' is not a number above 0"),
        (("--changed", "101"), "--changed is 101; give at most 100 percent"),
        (("--explorers", "128"), "--explorers 128 of --tp 1 need 128 GPUs, and all nodes have 128: none is left"),
        (("--tp", "16"), "--tp is 16, but a node has 8 GPUs"),
        (("--ranks", "100"), "--ranks is 100; give a multiple of a node's 8 GPUs, or less"),
        (("--ranks", "104"), "--ranks 104 do not fit beside them"),
        (("--model", "qwen9"), "--model is qwen9, and qwen9 is no file; give qwen3-0.6b, "),
        (("--model", "empty"), "--model is empty, and empty/config.json is no file; give qwen3-0.6b, "),
        (("--model", "list.json"), "--model: list.json names no model_type"),
        (("--measured", "none.json"), "--measured: none.json cannot be read as JSON"),
        (("--measured", "list.json"), "--measured: list.json holds no object"),
        (("--measured", "unknown.json"), "unknown.json has cpy, which is no constant (did you mean copy?)"),
        (("--measured", "zero.json"), "copy of zero.json is 0; it must be a number above 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_option(
    given: tuple[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in {"list": "[]", "unknown": '{"cpy": 1}', "zero": '{"copy": 0}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert cli.main(["plan", *BIG, *given]) == 2
    assert told in capsys.readouterr().err


def test_several_nodes_need_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--nodes=2", "--gpus=8", "--explorers=4", "--model=qwen3-8b"]) == 2
    assert "--nodes is 2, so --links is needed" in capsys.readouterr().err


def test_speeds_that_cannot_be_written_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--measure", str(tmp_path / "none" / "speeds.json")]) == 2
    assert "--measure: " in capsys.readouterr().err
