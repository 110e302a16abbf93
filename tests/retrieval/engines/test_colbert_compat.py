import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from leret.retrieval.engines.colbert_compat import _restored
from leret.retrieval.load import load_retriever
from tests.retrieval.small import ANIMALS, settings

pytest.importorskip("colbert", reason="colbert-ai is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_process_state_is_restored(tmp_path, capfd, monkeypatch):
    def state():
        return multiprocessing.get_start_method(allow_none=True), dict(os.environ), random.getstate()

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    before = state()
    load_retriever(settings("colbert", tmp_path, index=str(tmp_path / "index")), ANIMALS, tmp_path).search(["cat"], 1)
    assert before == state()
    assert capfd.readouterr().out == ""
    assert not (Path.cwd() / "experiments").exists()


def test_opening_a_checkpoint_is_offline():
    with _restored(), pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("attacker/evil-colbert", "artifact.metadata", cache_dir="nowhere")
    assert not constants.HF_HUB_OFFLINE


COMPILE = "from leret.retrieval.engines.colbert_compat import library\nwith library(): print('ready')"


@pytest.mark.timeout(3600)
def test_a_killed_compile_does_not_block_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    command = [sys.executable, "-c", COMPILE]
    first = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 1800
    while first.poll() is None and time.monotonic() < deadline and not list(tmp_path.glob("*/*/lock")):
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert list(tmp_path.glob("*/*/lock"))  # what the next one finds
    second = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    assert second.stdout == "ready\n"
    assert "compiling ColBERT's C++ extensions" in second.stderr
    assert not list(tmp_path.glob("*/*/lock"))
