"""``python -m leret``."""

from leret.cli.app import app

app()
