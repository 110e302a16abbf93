"""Examples as the sampler's ids: a prompt, a completion, one end token."""

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from leret.core.bundled import demo_policy
from leret.core.errors import TrainingError
from leret.training.data import TokenEncoder, TrainingExample, end_token, read_preferences
from tests.tiny import TEMPLATE

EXAMPLE = TrainingExample(
    "q1", ({"role": "user", "content": "who wrote the book"},), ("book author", "the author of the book")
)


@pytest.fixture
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def test_a_prompt_a_completion_and_one_end_token(tokenizer):
    (encoded,) = TokenEncoder(tokenizer, end_token(tokenizer, [5])).encode([EXAMPLE])
    words = tokenizer.convert_ids_to_tokens
    assert words(encoded.prompt) == ["<|user|>", "who", "wrote", "the", "book", "<|assistant|>"]
    assert words(encoded.completions[0]) == ["book", "author", "<|end|>"]
    assert words(encoded.completions[1]) == ["the", "author", "of", "the", "book", "<|end|>"]


def test_a_newline_after_the_end_token_is_not_trained(tokenizer):
    tokenizer.chat_template = TEMPLATE.replace("{{ '<|end|>' }}", "{{ '<|end|>\\n' }}")
    (encoded,) = TokenEncoder(tokenizer, end_token(tokenizer, [5])).encode([EXAMPLE])
    assert [(ids[-1], ids.count(5)) for ids in encoded.completions] == [(5, 1), (5, 1)]


def test_the_end_token_is_the_one_that_the_template_writes(tokenizer):
    assert end_token(tokenizer, [0, 5]) == 5
    tokenizer.chat_template = TEMPLATE.replace("<|end|>", "<|unk|>")
    assert end_token(tokenizer, [0, 1, 5]) == 1


def test_a_policy_that_does_not_know_the_words_of_the_probe_has_an_end_token():
    tokenizer = AutoTokenizer.from_pretrained(demo_policy())  # of a closed lexicon
    assert tokenizer.decode(end_token(tokenizer, [tokenizer.eos_token_id])) == tokenizer.eos_token


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("{{ '<|end|>' }}", "{{ ' .' }}", "'answer .'"),
        ("m['content'] }}", "'<|system|>' + m['content'] }}", "'<|system|> answer'"),
        ("{{ '<|end|>' }}", "{{ '<|user|><|end|>' }}", "'answer <|user|>'"),
    ],
    ids=["no end", "mark before", "mark after"],
)
def test_a_template_whose_turns_no_text_of_the_sampler_gives_is_refused(tokenizer, old, new, shown):
    tokenizer.chat_template = TEMPLATE.replace(old, new)
    with pytest.raises(TrainingError, match=r"writes a turn as .* generation stops \(<\|end\|>\)") as caught:
        end_token(tokenizer, [5])
    assert shown in str(caught.value)


def test_a_tokenizer_without_a_template_says_so(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(TrainingError, match=r"has no chat template; add chat_template\.jinja"):
        end_token(tokenizer, [5])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_text("not parquet"), "cannot be read"),
        (
            lambda path: pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), path),
            "has no column chosen, rejected, question_id",
        ),
    ],
    ids=["missing", "text", "columns"],
)
def test_preferences_that_cannot_be_read_are_named(run, damage, says):
    assert len(read_preferences(run.preferences)) == 48
    damage(run.preferences / "train.parquet")
    with pytest.raises(TrainingError, match=f"{says}.*leret pairs"):
        read_preferences(run.preferences)
