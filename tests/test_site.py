"""The documentation as a site: it builds without a warning, needs nothing from elsewhere, and pages that are written by
programs are up to date.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from docs import breaks, families
from docs import settings as all_settings
from tests.families import FAMILIES, REFUSED, WITH_IMAGES
from tests.pages import ROOT
from trinity_sync import config

PUBLIC = ("checkpoint", "checkpoint.reading", "integrations.verl", "report", "sync", "sync.stream")
"""The packages whose ``__all__`` is what programs may import. (That of `trinity_sync.config` is for this project.)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links and anchors are checked while it is built; what is wrong is a warning, and a warning ends it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_site_and_nothing_else_is(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    assert not list(site.rglob("*.py"))


def test_a_page_of_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = (
        r'<(?:script|img|iframe|source)[^>]+src="?(?:https?:)?//'
        r'|<link[^>]+rel="?(?:stylesheet|preconnect|icon)[^>]+href="?(?:https?:)?//'
    )
    assert not [path.name for path in site.rglob("*.html") if re.search(loads, path.read_text())]
    fetches = r"(?:@import\s*|url\()[\"']?(?:https?:)?//"
    assert not [path.name for path in site.rglob("*.css") if re.search(fetches, path.read_text())]


@pytest.mark.parametrize(
    "question",
    [
        "change the learning rate",
        "stop early",
        "keep the best",
        "sync less often",
        "use two GPUs",
        "resume elsewhere",
        "see samples",
        "compare two runs",
        "export",
        "go back to verl",
    ],
)
def test_the_search_has_a_heading_for_a_question(site: Path, question: str) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any(question in section["title"] for section in found)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("sync.mode", "sync.mode"),
        ("--dry-run", '<span class="whole">--dry-run</span>'),
        ("trainer.total_epochs=2", "trainer.<wbr>total_<wbr>epochs=<wbr>2"),
        ("sync/nccl.py::NcclPublisher", "sync/<wbr>nccl.<wbr>py::<wbr>NcclPublisher"),
        ("ckpt list RUN &lt;a&gt;", "ckpt list RUN &lt;a&gt;"),
        ('<a href="#a.b_c">a_long_name.of_it</a>', '<a href="#a.b_c">a_<wbr>long_<wbr>name.<wbr>of_<wbr>it</a>'),
    ],
)
def test_a_long_name_in_the_site_is_broken_at_its_joints_only(code: str, shown: str) -> None:
    assert breaks.on_post_page(f"<p><code>{code}</code>") == f"<p><code>{shown}</code>"
    assert breaks.on_post_page(f"<pre><code>{code}</code></pre>") == f"<pre><code>{code}</code></pre>"


def test_the_pages_of_the_site_have_these_joints(site: Path) -> None:
    assert "NcclPublisher" in (site / "sync.html").read_text().split("<wbr>", 1)[1]
    assert "docs/breaks.py" in (ROOT / "mkdocs.yml").read_text()


def test_the_pictures_of_the_site_are_small() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "docs" / "figures").glob("*.png")]
    assert max(sizes) < 150_000
    assert sum(sizes) < 1_000_000


def test_the_page_of_all_settings_is_what_the_option_files_say() -> None:
    assert all_settings.PAGE.read_text() == all_settings.page(), "write it again: make docs"


def test_the_tables_of_families_are_what_was_found() -> None:
    assert families.PAGE.read_text() == families.page(), "write it again: make docs"
    assert set(json.loads(families.RESULTS.read_text())) == {*FAMILIES, *WITH_IMAGES, *REFUSED}


@pytest.mark.parametrize(
    "option", ["backend=fsdp2", "backend=megatron", "task=jsonl", "explorer=vllm", "tracker=[wandb]"]
)
def test_every_setting_of_a_composed_configuration_is_on_that_page(option: str) -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.+)$", all_settings.PAGE.read_text(), re.MULTILINE))
    named = set(_leaves(OmegaConf.to_container(config.compose([option])), ""))  # type: ignore[arg-type]
    assert not {key for key in named if not any(f"{key}.".startswith(f"{row}.") for row in rows)}
    assert rows["sync.slots"].startswith("whole number, at least 2 | `2` | versions that fit")
    assert rows["task.validation.temperature"].startswith("number, at least 0 | `0.0` |")
    assert rows["retention.policies.keep_last.n"].startswith("whole number")


def _leaves(values: dict[str, object], above: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        elif value != {}:
            yield f"{above}{key}"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    module = ROOT / "trinity_sync" / name.replace(".", "/")
    source = (module / "__init__.py" if module.is_dir() else module.with_suffix(".py")).read_text()
    (names,) = re.findall(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)
    page = (ROOT / "docs" / "reference.md").read_text()
    assert not [public for public in ast.literal_eval(names) if f"::: trinity_sync.{name}.{public}\n" not in page]


def test_the_messages_of_troubleshooting_are_those_of_the_program() -> None:
    """In code and shortened by ``...``; what it quotes without are settings and files."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [message for message in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE) if "..." in message]
    assert len(quoted) > 15
    for message in quoted:
        parts = [part.strip() for part in message.split("...") if len(part.strip()) > 3]
        assert parts, message
        assert any(all(part in text for part in parts) for text in _texts()), message


@cache
def _texts() -> tuple[str, ...]:
    """The texts of each module, with a blank for what is put in."""
    return tuple(" ".join(_strings(ast.parse(path.read_text()))) for path in (ROOT / "trinity_sync").rglob("*.py"))


def _strings(node: ast.AST) -> Iterator[str]:
    for found in ast.walk(node):
        if isinstance(found, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in found.values)
        elif isinstance(found, ast.Constant) and isinstance(found.value, str):
            yield found.value


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_forms_for_issues_and_the_hooks_of_commits_can_be_read() -> None:
    """Each question of a form has a name, and each hook runs a program of `.venv`."""
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text())
        assert all(part["id"] and part["attributes"]["label"] for part in form.get("body", [])), path.name
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    programs = {hook["entry"].split()[0] for hook in local["hooks"]}
    lint = re.search(r"^LINT = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint
    assert set(re.findall(r"\$\(BIN\)/([\w-]+)", lint[1])) == {Path(name).name for name in programs} - {"python"}
