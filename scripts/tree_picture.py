"""Draw a question's tree for the README: ``python scripts/tree_picture.py [--run DIR] [--question ID]``.

Writes docs/tree.png, a screenshot of `leret view` for a demo run (``make demo``). Needs ``pip install playwright`` and
the program ``chromium``. The default question is one that only the second search solves, with the fewest different
queries, but at least three per step.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from leret.core.runs import Run
from leret.viewer.index import RunIndex

PICTURE = Path(__file__).resolve().parents[1] / "docs/tree.png"
WIDTH, SCALE, COLOURS = 820, 1.5, 48
SQL = """
SELECT question_id FROM groups WHERE sampled GROUP BY question_id
HAVING count(*) = 2 AND min(texts) >= 3 AND min(best - worst) > 0
    AND max(best) FILTER (WHERE step = 0) < 1 AND max(best) FILTER (WHERE step = 1) = 1
ORDER BY sum(texts), question_id LIMIT 1
"""


def choose(run: Run) -> str:
    """Return the id of the default question."""
    with tempfile.TemporaryDirectory() as scratch, closing(RunIndex(run, Path(scratch) / "index.db")) as index:
        while not index.complete:
            index.advance()
        return index.one(SQL) or sys.exit(f"{run.path} has no such question; pass --question ID")


def screenshot(url: str, question_id: str) -> bytes:
    """Return a PNG of a question's title and tree, without messages and passages."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 800}, device_scale_factor=SCALE)
        page.goto(f"{url}q/{question_id}", timeout=120_000)
        page.locator("#main:not(:has(.notice)) .chips").first.wait_for(timeout=120_000)  # the gold documents are known
        page.add_style_tag(content=".top, .crumbs, .messages { display: none !important; }")
        title, tree = (page.locator(name).bounding_box() for name in ("h1", ".path"))
        assert title is not None
        assert tree is not None
        clip = {"x": 0, "y": title["y"] - 12, "width": WIDTH, "height": tree["y"] + tree["height"] - title["y"] + 20}
        return page.screenshot(full_page=True, clip=clip)


def main() -> None:
    """Write docs/tree.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--question", metavar="ID")
    options = parser.parse_args()
    question_id = options.question or choose(Run.open(options.run))
    command = [sys.executable, "-m", "leret", "view", str(options.run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            picture = screenshot(process.stdout.readline().split(" at ")[1].split()[0], question_id)
        finally:
            process.terminate()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True)
    print(f"{question_id}: {PICTURE}, {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
