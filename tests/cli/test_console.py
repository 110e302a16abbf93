"""What commands write: tables and facts for a terminal or a pipe, and progress."""

from __future__ import annotations

import pytest

from leret.cli.console import complain, done, facts, say, table
from leret.core.progress import ProgressLines
from tests.cli.test_app import ANSI


def test_no_text_is_markup_an_emoji_or_a_command_of_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    odd = "[/] [red] :bear: a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\u202ee\rf\x7fg\u2066h\ud800"
    say(odd)
    done(odd)
    complain(odd)
    facts({"a": odd})
    table(("c", "d"), [(odd, odd)], title=odd)
    lines = ProgressLines()
    lines.start("sampling", 1)
    lines.advance(1, best=odd)
    lines.finish()
    shown = "".join(capsys.readouterr())
    assert shown.count("[/] [red] :bear: a") == shown.count("g h") == 8
    assert not [char for char in shown if not char.isprintable() and char != "\n"]


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_a_table_on_a_terminal_cuts_no_number(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes standard output for a terminal
    row = ["a-policy-of-a-long-name-" * 2, "0.123 [0.456, 0.789]", "0.5555", "1.0000", "12", "1,234,567"]
    table(["system", "recall", "AP", "all gold found", "failed", "LM calls"], [row, row], title="of systems")
    lines = ANSI.sub("", capsys.readouterr().out).splitlines()
    assert "…" not in "".join(lines)
    assert sum(all(figure in line for figure in row[1:]) for line in lines) == 2
    cells = lines[next(i for i, line in enumerate(lines) if "──" in line) + 1 :]
    assert "".join(line.split()[0] for line in cells if line.strip()) == 2 * row[0]
    assert columns == 40 or max(map(len, lines)) <= columns


def test_a_table_in_a_pipe_has_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    table(["system", "note"], [["a", "x"], ["b", "a note of many words " * 9]], title="of systems")
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert any("a note of many words " * 9 in f"{line} " for line in lines)
