"""``python -m leret``, and the command ``leret``."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while the first modules are imported ends with one line and exit code 130."""
    try:
        from leret.cli.app import app
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        print("error: stopped; run the same command to continue", file=sys.stderr)
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
