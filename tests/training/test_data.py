import random
import shutil
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from leret.core.errors import PolicyError, TrainingError
from leret.core.runs import Run
from leret.policies.local.chat_template import end_token
from leret.sampling.stage import sample
from leret.training.data import TokenEncoder, TrainingExample, examples_digest, has_sampled_tokenizer
from leret.training.model import find_initial
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from tests.first_steps import read_lines, succeeds
from tests.sampling.fakes import WORDS, content, recipe_of, write_data
from tests.tiny import SPECIALS, TEMPLATE, tiny_policy

END = 5
EXAMPLE = TrainingExample("q1", ({"role": "user", "content": "who wrote the book"},), ("book author", "the author"))


@pytest.fixture
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


@pytest.mark.parametrize(("form", "columns"), [("sft", set()), ("kto", {"label"})])
def test_an_export_has_the_rows_that_a_trainer_of_trl_reads(run, tmp_path, form, columns):
    succeeds("store", "export", "--run", run.path, "--out", tmp_path / "rows.jsonl", "--form", form)
    rows = read_lines(tmp_path / "rows.jsonl")
    assert len(rows) == {"sft": 24, "kto": 48}[form]
    assert set(rows[0]) == {"prompt", "completion", "question_id", "is_cut"} | columns
    assert rows[0]["completion"][0]["role"] == "assistant"
    if form == "kto":
        assert sum(row["label"] for row in rows) == 24


def encoded(tokenizer, text, ids=None, is_cut=False, **how):
    example = TrainingExample("q1", EXAMPLE.prompt, (text,), is_cut=(is_cut,), token_ids=(ids,))
    return TokenEncoder(tokenizer, end_token(tokenizer, [END])).encode([example], **how)[0].completions[0]


def test_a_cut_completion_has_no_end_token(tokenizer):
    book, author = tokenizer.convert_tokens_to_ids(["book", "author"])
    assert encoded(tokenizer, "book author") == [book, author, END]
    assert encoded(tokenizer, "book author", is_cut=True) == [book, author]
    assert encoded(tokenizer, "book author", (book, author), is_cut=True) == [book, author]
    assert encoded(tokenizer, "book author", (book, author)) == [book, author, END]


def test_sampled_ids_are_trained_if_they_are_the_text(tokenizer):
    system, book, author = tokenizer.convert_tokens_to_ids(["<|system|>", "book", "author"])
    assert encoded(tokenizer, "book", (system, book, END)) == [system, book, END]  # the text omits special tokens
    assert encoded(tokenizer, "book", (book, author)) == [book, END]  # a stop string removed the rest
    for ids, says in (
        ((author, END), "for the completion"),
        ((END, author), "that go on after an end token"),
        ((10_000,), "but the vocabulary has"),
    ):
        assert encoded(tokenizer, "book", ids) == [book, END]  # another model's tokenizer
        with pytest.raises(TrainingError, match=f"question q1: the sampler sent token ids .*{says}"):
            encoded(tokenizer, "book", ids, same_tokenizer=True)


def test_the_digest_of_examples_covers_endings_and_ids():
    one = replace(EXAMPLE, completions=("book",))
    names = {examples_digest([replace(one, **keys)]) for keys in ({}, {"is_cut": (True,)}, {"token_ids": ((7,),)})}
    assert len(names) == 3
    assert examples_digest([replace(one, is_cut=(False,), token_ids=(None,))]) == examples_digest([one])


SFT = {"targets": "random", "require_spread": False, "max_targets": 100, "max_steps": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A random policy with a byte-level BPE tokenizer: most of its texts have several encodings."""
    path = tiny_policy(tmp_path_factory.mktemp("bpe") / "policy")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [" ".join(random.Random(seed).choices(WORDS, k=20)) for seed in range(50)]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=80, special_tokens=[*SPECIALS]))
    marks = {"pad_token": SPECIALS[0], "eos_token": SPECIALS[-1], "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **marks).save_pretrained(path)
    generation = GenerationConfig.from_pretrained(path)
    generation.suppress_tokens = [
        *range(5),
        *range(backend.get_vocab_size(), AutoConfig.from_pretrained(path).vocab_size),
    ]
    generation.save_pretrained(path)
    return path


def sampled(run, policy, samples=8, **sampling):
    write_data(run.path.parent, 30)
    keys = {"prompts": 1, "samples": samples, "max_unparsed_rate": 1.0, **sampling}
    files = {name: str(run.path.parent / f"{name}.jsonl") for name in ("corpus", "questions")}
    return sample(recipe_of({**files, "split": "train"}, policy, **keys), run)


@pytest.fixture
def trained_ids(monkeypatch):
    seen, encode = [], TokenEncoder.encode

    def recorded(self, *given, **how):
        assert how["same_tokenizer"]
        encoded = encode(self, *given, **how)
        seen.extend(tuple(ids) for one in encoded for ids in one.completions)
        return encoded

    monkeypatch.setattr(TokenEncoder, "encode", recorded)
    return seen


def test_trained_ids_are_sampled_ids_of_a_bpe_policy(bpe, tmp_path, trained_ids):
    run = Run.create(tmp_path / "run")
    format_too = {"reward": {"parts": ["ap", "format"]}}  # without it a random policy has few pairs
    report = sampled(run, {"model": str(bpe), "max_tokens": 6}, samples=20, **format_too)
    train(SFTRecipe(**SFT, init_from=str(bpe)), run)
    n_targets = len(trained_ids)
    train(IPORecipe(max_steps=1, device="cpu"), run)
    assert len(trained_ids) > n_targets >= 400
    samples = [one for group in content(run) for one in group.samples]
    truth = {one.token_ids for one in samples}
    assert {*trained_ids} <= truth
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    again = [tuple(tokenizer(one.completion)["input_ids"]) for one in samples if one.is_cut]
    assert sum(ids not in truth for ids in again) > len(again) / 10  # encoded again, many texts have other ids
    assert report.cut == sum(one.is_cut for one in samples) > report.samples / 10
    assert any("raise policy.max_tokens" in note for note in report.notes)


@pytest.mark.parametrize(("model", "same"), [("policy-0123abcd", True), ("org/policy", True), ("other", False)])
def test_a_served_model_has_the_tokenizer_of_the_initial_policy_by_its_name(bpe, tmp_path, model, same):
    run = Run.create(tmp_path / "run")
    run.update(sampling={"policy": {"kind": "openai", "model": model, "urls": ["http://a"]}})
    assert has_sampled_tokenizer(run, find_initial(run, str(bpe))) is same


def test_a_template_that_training_refuses_is_refused_at_sampling(bpe, tmp_path):
    broken = shutil.copytree(bpe, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text(TEMPLATE.replace("<|end|>", "."))
    run = Run.create(tmp_path / "run")
    with pytest.raises(PolicyError, match=r"a turn must end with a stop token \(<\|end\|>\)"):
        sampled(run, {"model": str(broken), "max_tokens": 6})
    assert content(run) == []
