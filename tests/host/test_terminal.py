"""The standard streams of our commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.host.terminal import output_ended, output_lost, printable, safe_streams

COMMAND = (sys.executable, "-m", "trinity_sync.cli")


def test_control_characters_are_escaped_on_both_streams(capfd: pytest.CaptureFixture[str]) -> None:
    with safe_streams():
        print("name \x1b[31mred\r\x07\x9b \N{RIGHT-TO-LEFT OVERRIDE}x\tand é")
        print("error \x1b]0;title\x07", file=sys.stderr)
    found = capfd.readouterr()
    assert found.out == "name ?[31mred??? ?x\tand é\n"
    assert found.err == "error ?]0;title?\n"


def test_a_progress_bar_begins_its_line_anew_and_foreign_text_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    with safe_streams():
        sys.stderr.write("\r 10%|##")
        print("name: \rdone", file=sys.stderr)
    assert os.fsencode(capfd.readouterr().err) == b"\r 10%|##name: ?done\n"


def test_printable_text_stays_as_it_is() -> None:
    assert printable("a é 漢") == "a é 漢"
    assert printable("a\nb\x1b", keep="\n") == "a\nb?"
    assert printable("日本\u3000語 a\xa0b\u202fc\u2028") == "日本\u3000語 a\xa0b\u202fc?"


def test_output_that_cannot_be_encoded_is_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [*COMMAND, "ckpt", "list", "/naïve"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert done.returncode == 2
    assert b"na\\xefve" in done.stderr


def piped(*given: str) -> tuple[int, str]:
    """Run a command whose reader leaves before it writes; exit code and stderr."""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([*COMMAND, *given], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writes)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("given", "code"), [(("explain", "sync"), 0), (("--help",), 0), (("explain", "nothing"), 2)])
@pytest.mark.few(1)
def test_a_reader_that_has_left_changes_no_result(given: tuple[str, ...], code: int) -> None:
    found, told = piped(*given)
    assert found == code
    assert "Traceback" not in told
    assert "Exception ignored" not in told


@pytest.mark.parametrize("given", [("explain", "sync"), ("--help",), ("run", "--help"), ("run", "--cfg", "job")])
@pytest.mark.few(1)
def test_output_on_a_full_disk_is_one_line_and_a_failure(given: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *given], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.few(2)
def test_closed_streams_change_no_result(closed: str) -> None:
    command = f"{sys.executable} -m trinity_sync.cli explain sync {closed}; echo $? >&9"
    done = subprocess.run(["bash", "-c", f"exec 9>&1; {command}"], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0"
    assert "Traceback" not in done.stderr


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    text = (
        f"import trinity_sync.cli; f = open({str(tmp_path / 'x')!r}, 'w'); print('printed'); f.write(str(f.fileno()))"
    )
    subprocess.run(["bash", "-c", f'{sys.executable} -c "{text}" >&- 2>&- <&-'], timeout=60, check=True)
    assert int((tmp_path / "x").read_text()) > 2


def test_the_streams_of_before_are_back_afterwards() -> None:
    before = sys.stdout, sys.stderr
    with safe_streams(), safe_streams():
        assert sys.stdout is not before[0]
        assert not output_ended()
        assert not output_lost()
    assert (sys.stdout, sys.stderr) == before


def test_rich_keeps_its_colours_and_foreign_text_has_none(capfd: pytest.CaptureFixture[str]) -> None:
    from rich.text import Text

    from trinity_sync.tracking.console import PlainConsole

    with safe_streams():
        PlainConsole(force_terminal=True, color_system="standard").print(Text("a\x1b[2Jb", style="red"))
    assert capfd.readouterr().out == "\x1b[31ma?[2Jb\x1b[0m\n"
