from transformers import AutoModelForCausalLM

from leret.policies.checkpoints import policy_directory
from models.pretrain.stage import copied, distinct, generate


def test_measures_are_shares_of_words_and_of_different_samples():
    assert copied([[[1, 2], [9, 1]]], [[1, 2, 3]]) == 0.75
    assert distinct([[[1], [1]], [[1], [2]]]) == 0.75


def test_completions_end_before_the_end_token_and_do_not_depend_on_their_neighbours():
    model = AutoModelForCausalLM.from_pretrained(str(policy_directory("demo")))
    prompts = [(6, 7, 8), (9, 10, 11, 12, 13, 14)]
    together = generate(model, prompts, 0)
    alone = [generate(model, [prompt], 0)[0] for prompt in prompts]
    assert together == alone
    assert all(2 not in text for some in generate(model, prompts, 4) for text in some)
