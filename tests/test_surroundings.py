"""The process that a command runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHAPES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
SHOWN = """
import json, os
from leret.cli.surroundings import prepare
prepare(False)
print(json.dumps(dict(os.environ)))
"""


def environment(**given: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*SHAPES, "DSPY_CACHEDIR")}
    told = subprocess.run([sys.executable, "-c", SHOWN], env=kept | given, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(told.stdout)
    return found


def test_the_caches_of_shapes_are_bounded() -> None:
    found = environment()
    assert [found[name] for name in SHAPES] == ["64", "64"]


@pytest.mark.parametrize("name", SHAPES)
def test_what_the_user_said_is_left_alone(name: str) -> None:
    assert environment(**{name: "512"})[name] == "512"


def test_dspys_cache_goes_away_with_the_process() -> None:
    assert not Path(environment()["DSPY_CACHEDIR"]).exists()


def test_dspys_cache_is_where_the_user_wants_it(tmp_path: Path) -> None:
    assert environment(DSPY_CACHEDIR=str(tmp_path))["DSPY_CACHEDIR"] == str(tmp_path)
    assert tmp_path.exists()


def test_no_character_of_a_warning_is_a_command_of_the_terminal() -> None:
    code = (
        "import logging\nfrom leret.cli.process import prepare\nprepare(False)\n"
        "logging.getLogger('leret').warning('refused: %s', 'a\\x1b[31mb\\u202ec')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stderr == "refused: a [31mb c\n"
