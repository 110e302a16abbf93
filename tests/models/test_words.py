from functools import cache

import torch

from leret.core.types import Passage
from leret.datasets.world.generate import generate
from models.pretrain.examples import call_messages, prompt_ids
from models.words import SPECIAL, build_model, build_tokenizer


@cache
def tokenizer():
    return build_tokenizer()


@cache
def model():
    return build_model(len(tokenizer()), seed=0)


def ids(text):
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def test_every_text_of_other_worlds_is_in_the_vocabulary():
    unknown = tokenizer().unk_token_id
    documents, questions = generate(41, 100, 20, 100, three_hop=0.3)
    texts = [f"{d.title} | {d.text}" for d in documents] + [q.text for q in questions]
    assert [text for text in texts if unknown in ids(text)] == []


def test_a_prompt_is_a_token_prefix_of_the_conversation_which_ends_in_the_end_token():
    found = (Passage("b", "Ada Keller", "Ada Keller is a writer born in 1931 in Norwick.", 1.0),)
    demos = [{"question": "Which film is older?", "query": "film year"}]
    messages = call_messages("In which city was the director of The Golden Harbor born?", found, demos)
    answered = [*messages, {"role": "assistant", "content": "ada keller city"}]
    whole = ids(str(tokenizer().apply_chat_template(answered, tokenize=False)))
    assert whole == [*prompt_ids(tokenizer(), messages), *ids("ada keller city"), tokenizer().eos_token_id]


def test_a_fresh_model_says_what_followed_a_word_before():
    torch.manual_seed(0)
    names = torch.randint(len(SPECIAL), len(tokenizer()), (4, 60))
    twice = torch.cat([names, names], 1)
    with torch.no_grad():
        said = model()(twice).logits[:, 60:-1].argmax(-1)
    assert (said == names[:, 1:]).float().mean() > 0.85
