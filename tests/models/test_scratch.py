import json
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.core.progress import Progress
from models import scratch
from models.gate import make_gate
from models.worlds import StreamSettings


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(scratch, "make_gate", lambda tokenizer: make_gate(tokenizer, n=2))
    monkeypatch.setattr(scratch, "StreamSettings", partial(StreamSettings, questions=20))
    for name in ("_LOOKING_UP", "MIXED"):
        monkeypatch.setattr(scratch, name, replace(getattr(scratch, name), questions=20))
    for name in ("_FIRST", "SECOND"):
        monkeypatch.setattr(scratch, name, replace(getattr(scratch, name), pool_rows=8, batch_tokens=256))
    monkeypatch.setattr("models.pretrain.stage._MAX_TOKENS", 4)


def test_two_steps_leave_a_model_directory_with_its_log_and_card(tmp_path):
    progress = Mock(spec=Progress)
    out = scratch.pretrain_scratch(tmp_path / "policy", progress, seed=1, steps=2)
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert len(tokenizer) == model.config.vocab_size
    assert "seed 1, 2 steps" in (out / "README.md").read_text(encoding="utf-8")
    assert {"bridge", "copied"} <= json.loads((out / "pretrain.jsonl").read_text().splitlines()[-1]).keys()
    assert sum(call.args[0] for call in progress.advance.call_args_list) == 2
