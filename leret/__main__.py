"""``python -m leret``, and the command ``leret``."""

import sys

from leret.core.errors import was_interrupted


def main() -> None:
    """Run the command line. Ctrl-C while the first modules are imported ends with one line and exit code 130."""
    try:
        from leret.cli.app import app
    except BaseException as error:
        if not was_interrupted(error):
            raise
        print("error: stopped; run the same command to continue", file=sys.stderr)
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
