import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertLMHeadModel

from leret.config.training import TrainingRecipe
from leret.core.bundled import demo_policy
from leret.core.errors import TrainingError
from leret.training.algorithms.preference import preference_trainer
from leret.training.algorithms.sft import sft_trainer
from leret.training.data import Example
from leret.training.preflight import check_loss
from leret.training.process import surroundings
from leret.training.tokens import Encoded, Encoder, end_token
from tests.tiny import TEMPLATE, tiny_policy

PAIRS = [Encoded([3, 40, 41, 4], ([50, 51, 5], [60, 5])), Encoded([3, 43, 4], ([54, 5], [61, 62, 63, 5]))]
EXAMPLE = Example("q1", ({"role": "user", "content": "who wrote the book"},), ("book author", "the author of the book"))


def trainer_of(model, base, tmp_path, algorithm, **keys):
    recipe = TrainingRecipe(algorithm=algorithm, init="base", batch_size=2, **keys)
    tokenizer = AutoTokenizer.from_pretrained(base)
    make = sft_trainer if algorithm == "sft" else preference_trainer
    with surroundings(tmp_path, 1):
        return make(recipe, model, tokenizer, PAIRS, tmp_path, "cpu"), recipe


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "sft"},
        {"algorithm": "dpo"},
        {"algorithm": "ipo"},
        {"algorithm": "ipo", "reduction": "token", "sft_weight": 0.3},
    ],
    ids=["sft", "dpo", "ipo", "ipo-token-sft"],
)
@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_one_matrix_heads_pass_and_keep_their_weights(tmp_path, arch, keys):
    base = tiny_policy(tmp_path / "base", arch)
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer, recipe = trainer_of(model, base, tmp_path / "out", **keys)
    assert check_loss(trainer, recipe) < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.model.training


@pytest.mark.parametrize("algorithm", ["sft", "ipo"])
def test_a_head_of_more_than_one_matrix_is_refused(tmp_path, base, algorithm):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        is_decoder=True,
    )
    trainer, recipe = trainer_of(BertLMHeadModel(config), base, tmp_path, algorithm)
    with pytest.raises(
        TrainingError, match=r"TRL computes a loss of .* for BertLMHeadModel where the model itself gives"
    ):
        check_loss(trainer, recipe)


def test_the_loss_of_the_bert_head_is_right_at_the_first_step(tmp_path, base):
    """Why the check moves the weights: where the policy is its own reference, every log-ratio is 0 however wrong."""
    config = BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        is_decoder=True,
    )
    trainer, _ = trainer_of(BertLMHeadModel(config), base, tmp_path, "ipo", beta=0.05)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    with torch.no_grad():
        assert float(trainer.compute_loss(trainer.model, batch)) == pytest.approx(100.0, abs=1e-3)


def test_a_prompt_a_completion_and_one_end_token(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    encoder = Encoder(tokenizer, end_token(tokenizer, [5]))
    (encoded,) = encoder.encode([EXAMPLE])
    words = tokenizer.convert_ids_to_tokens
    assert words(encoded.prompt) == ["<|user|>", "who", "wrote", "the", "book", "<|assistant|>"]
    assert words(encoded.completions[0]) == ["book", "author", "<|end|>"]
    assert words(encoded.completions[1]) == ["the", "author", "of", "the", "book", "<|end|>"]


def test_a_newline_after_the_end_token_is_not_trained(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE.replace("{{ '<|end|>' }}", "{{ '<|end|>\\n' }}")
    encoder = Encoder(tokenizer, end_token(tokenizer, [5]))
    (encoded,) = encoder.encode([EXAMPLE])
    assert [ids[-1] for ids in encoded.completions] == [5, 5]
    assert [ids.count(5) for ids in encoded.completions] == [1, 1]


def test_the_end_token_is_the_one_that_the_template_writes(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
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
def test_a_template_whose_turns_no_text_of_the_sampler_gives_is_refused(base, old, new, shown):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE.replace(old, new)
    with pytest.raises(TrainingError, match=r"writes a turn as .* generation stops \(<\|end\|>\)") as caught:
        end_token(tokenizer, [5])
    assert shown in str(caught.value)


def test_a_tokenizer_without_a_template_says_so(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    with pytest.raises(TrainingError, match=r"has no chat template; add chat_template\.jinja"):
        end_token(tokenizer, [5])
