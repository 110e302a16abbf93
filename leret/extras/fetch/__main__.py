"""``python -m leret.extras.fetch questions.jsonl --url-field document_url --out pages``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from leret.core.errors import LeretError
from leret.core.progress import shown
from leret.extras.fetch.corpus import fetch, read_list
from leret.extras.fetch.fetcher import FetchSettings


def main(words: Sequence[str] | None = None) -> int:
    """Fetch the pages of a list, print the failures by kind, and return the exit code."""
    options = _parser().parse_args(words)
    settings = FetchSettings(
        options.rate,
        options.timeout,
        round(options.max_mb * 2**20),
        options.max_redirects,
        tuple(options.allow_host),
    )
    try:
        urls, faults = read_list(options.list, options.url_field, options.id_field)
        with shown() as progress:
            report = fetch(urls, faults, options.out, settings, progress)
    except LeretError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        fault = f"{options.out} cannot be written ({error.strerror}); choose another directory"
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: stopped; run the same command to continue", file=sys.stderr)
        return 130
    kinds = Counter(kind for _, kind, _ in report.failures)
    first = {kind: (url, why) for url, kind, why in reversed(report.failures)}
    for kind, n in kinds.most_common():
        url, why = first[kind]
        print(f"{kind}: {n:,} pages, first {url}: {why}")
    print(
        f"{report.n_documents:,} documents in {options.out}/corpus.jsonl, "
        f"{kinds.total():,} failures in {options.out}/failures.tsv"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m leret.extras.fetch",
        description="Fetch web pages into a corpus of their main texts. "
        "Run the same command again to resume.",
    )
    add = parser.add_argument
    add("list", type=Path, help="JSON lines, CSV, or a file with one URL per line")
    add(
        "--out",
        type=Path,
        required=True,
        help="directory for corpus.jsonl, failures.tsv and the cache",
    )
    add("--url-field", help="field of LIST with the URL")
    add("--id-field", help="field with the id; default: the URL")
    add("--rate", type=_positive, default=1.0, help="maximum requests per second to one site")
    add("--timeout", type=_positive, default=30.0, help="seconds per page, including redirects")
    add("--max-mb", type=_positive, default=10.0, help="maximum size of a decompressed page")
    add("--max-redirects", type=int, default=5, help="maximum number of redirects of a page")
    add(
        "--allow-host",
        action="append",
        default=[],
        help="another host for redirects; repeatable",
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
