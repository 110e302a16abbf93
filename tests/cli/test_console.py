from pathlib import Path

import pytest

from leret.cli.console import as_json, complain, done, facts, next_command, say, table
from leret.core.progress import ProgressLines
from tests.cli.test_app import ANSI


@pytest.fixture(autouse=True)
def _without_json():
    as_json(False)  # whatever the last command of another test wanted


def test_no_text_is_markup_an_emoji_or_a_command_of_the_terminal(capsys):
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
    assert shown.count("[/] [red] :bear: a") == shown.count("g[U+2066]h") == 8
    assert not [char for char in shown if not char.isprintable() and char != "\n"]


@pytest.mark.parametrize(("columns", "n_shown"), [(40, 2), (60, 4), (80, 6), (100, 6)])
def test_a_table_on_a_terminal_cuts_and_wraps_no_number(columns, n_shown, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes standard output for a terminal
    heads = ["system", "recall", "AP", "all gold found", "failed", "LM calls"]
    row = ["a-policy-of-a-long-name-" * 2, "0.123 [0.456, 0.789]", "0.5555", "1.0000", "12", "1,234,567"]
    table(heads, [row, row], title="of systems")
    written = capsys.readouterr()
    lines = ANSI.sub("", written.out).splitlines()
    assert "…" not in "".join(lines)
    assert sum(all(figure in line for figure in row[1:n_shown]) for line in lines) == 2
    cells = lines[next(i for i, line in enumerate(lines) if "──" in line) + 1 :]
    assert "".join(line.split()[0] for line in cells if line.strip()) == 2 * row[0]
    assert max(map(len, lines)) <= columns
    told = f"columns hidden in this narrow terminal: {', '.join(heads[n_shown:])}" if n_shown < len(heads) else ""
    assert " ".join(told.split()) in " ".join(ANSI.sub("", written.err).split())


def test_a_terminal_wraps_messages_at_spaces_and_commands_at_flags(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    complain("the words of a message that is longer than the terminal is wide")
    command = "  leret sample sample.yaml --run runs/first --set a.b=c"
    complain("name:\n  --field a='b c' --field doc_id=k")
    say(f"next:\n{command}\n  q1: an indented line that a shell does not read")
    facts({"purpose": "the value has more words than fit into one line"})
    written = capsys.readouterr()
    errors = ANSI.sub("", written.err).splitlines()
    assert [line for line in errors if len(line) > 30] == []
    assert errors[-2:] == ["  --field a='b c' \\", "    --field doc_id=k"]
    out = ANSI.sub("", written.out).splitlines()
    assert out[1:6] == ["  leret sample sample.yaml \\", "    --run runs/first \\", "    --set a.b=c",
                        "  q1: an indented line that a", "    shell does not read"]  # fmt: skip
    assert [line[:11].strip() for line in out[6:]] == ["purpose", "", ""]


def test_the_next_command_comes_from_the_header_or_the_shipped_recipes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("# Commands:\n#   leret train demo-sft --run runs/first --set a='b c'\n")
    for stage, recipe, command in (
        ("train", "mine.yaml", "leret train demo-sft --run 'runs/my run' --set a='b c'"),
        ("eval", "sft", "leret eval RECIPE --run 'runs/my run'"),
        ("train", "agentic-rag", "leret run agentic-rag --run 'runs/my run'"),
    ):
        next_command(stage, recipe, Path("runs/my run"))
        assert capsys.readouterr().out == f"next:\n  {command}\n"
    Path("eval.yaml").write_text("# leret eval eval.yaml --run 'runs/my run'\n")
    next_command("eval", "mine.yaml", Path("runs/my run"))
    assert capsys.readouterr().out == "next:\n  leret eval eval.yaml --run 'runs/my run'\n"
