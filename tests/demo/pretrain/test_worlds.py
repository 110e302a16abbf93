"""The rows of the demo's policy: gold-blind, repeatable, names exchanged whole."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import islice

from transformers import PreTrainedTokenizerFast

from leret.demo.pretrain.loop import Row
from leret.demo.pretrain.words import NAME_CLASSES, build_tokenizer
from leret.demo.pretrain.worlds import HOP2_STYLES, Scene, StreamSettings, _Names, encoded, rows, scenes, write

SMALL = StreamSettings(seed=3, questions=12, uses=2, lists=(0.5, 0.1), settled=20)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def said(tokens: tuple[int, ...]) -> str:
    return str(tokenizer().decode(list(tokens)))


def test_the_stream_is_the_same_for_the_same_seed_and_another_one_for_another() -> None:
    first = list(islice(rows(tokenizer(), SMALL), 60))
    assert first == list(islice(rows(tokenizer(), SMALL), 60))
    assert first != list(islice(rows(tokenizer(), StreamSettings(seed=4, questions=12)), 60))


def test_rows_have_no_unknown_word_and_targets_that_end() -> None:
    end, unknown = tokenizer().eos_token_id, tokenizer().unk_token_id
    for row in islice(rows(tokenizer(), SMALL), 80):
        assert unknown not in row.prompt
        assert row.targets
        assert all(target[-1] == end and len(target) > 1 for target in row.targets)
        assert len(row) < 1024


def test_prompts_are_what_the_compact_adapter_sends() -> None:
    scene = scenes(7, SMALL)[0]
    demos = [{"question": "Which film is older?", "query": "film older"}]
    lines = [f"{p.title} | {p.text}" for p in scene.found]
    shown = "\n".join(" ".join(line.split()[:40]) for line in lines)
    text = (
        "<|user|>question: Which film is older?<|end|><|assistant|>film older<|end|>"
        f"<|user|>question: {scene.question.text}\ncontext:\n{shown}<|end|><|assistant|>"
    )
    assert encoded(tokenizer(), scene, demos) == tuple(tokenizer()(text)["input_ids"])


def test_demonstrators_do_not_look_at_the_gold() -> None:
    """Writing on a question whose gold, answer and type were taken away gives the same queries."""
    for scene in scenes(9, SMALL):
        blind = replace(scene.question, gold=(), answers=(), type=None, hops=None)
        for style in HOP2_STYLES:
            one = write(style, Scene(scene.question, scene.found, scene.idf, random.Random(1)))
            two = write(style, Scene(blind, scene.found, scene.idf, random.Random(1)))
            assert one == two


def test_a_name_part_is_exchanged_for_the_same_one_of_its_class_everywhere() -> None:
    names = _Names(tokenizer())
    ids = tokenizer().get_vocab()
    row = Row(
        tuple(tokenizer()("ada keller is an artist born in norwick. ada boris")["input_ids"]),
        (tuple(tokenizer()("ada keller city")["input_ids"]),),
    )
    other = names.exchanged(row, random.Random(0))
    words = [said((token,)) for token in other.prompt]
    first_names, last_names = ({word.lower() for word in NAME_CLASSES[i]} for i in (0, 1))
    assert words[0] in first_names
    assert words[1] in last_names
    assert words[2:7] == ["is", "an", "artist", "born", "in"]
    assert words[9] == words[0] != words[10]
    assert other.targets[0] == (ids[words[0]], ids[words[1]], ids["city"])
