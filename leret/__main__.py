"""``python -m leret``."""

from leret.cli import main

main()
