"""``python -m models``."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from models import __main__ as command


def test_a_builder_gets_what_the_command_line_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.BUILDERS, "demo", build := Mock())
    command.main(["demo", "--out", str(tmp_path), "--steps", "2"])
    assert build.call_args.args[0] == tmp_path
    assert build.call_args.kwargs == {"seed": 0, "steps": 2}
    with pytest.raises(SystemExit):
        command.main(["nobody", "--out", "x"])
