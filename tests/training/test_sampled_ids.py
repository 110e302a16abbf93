"""What is trained is what was sampled: endings and token ids, with a byte-level BPE tokenizer."""

import asyncio
import random
import shutil
from contextlib import closing

import pytest
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from leret.config.policy import LocalPolicySettings
from leret.core.errors import PolicyError, TrainingError
from leret.core.runs import Run
from leret.policies.base import Request
from leret.policies.local.policy import LocalPolicy
from leret.sampling.stage import sample
from leret.training.data import TokenEncoder, has_sampled_tokenizer
from leret.training.model import find_initial
from leret.training.stage import train
from leret.training.stored.preference import IPORecipe
from leret.training.stored.sft import SFTRecipe
from tests.http.servers import serving
from tests.policies.servers import ChatServer
from tests.sampling.fakes import WORDS, content, recipe_of, write_data

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SFT = {"targets": "random", "require_spread": False, "max_targets": 100, "max_steps": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A random policy with a byte-level BPE tokenizer: most of its texts have several encodings."""
    import torch

    path = tmp_path_factory.mktemp("bpe") / "policy"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", END]
    texts = [" ".join(random.Random(seed).choices(WORDS, k=20)) for seed in range(50)]
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=specials)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token=END, chat_template=TEMPLATE, model_max_length=512
    )
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=4, **size)
    model = LlamaForCausalLM(config)
    model.generation_config.suppress_tokens = [0, 1, 2, 3]
    for part in (tokenizer, model):
        part.save_pretrained(path)
    return path


class Returns(ChatServer):
    """Writes with a policy of this process, and returns token ids, as changed by ``ids``, if asked."""

    models = ("policy-0123abcd",)
    ids = staticmethod(list)
    n_more = 0  # prompt tokens

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    async def route(self, request, body):
        if request.path != "/v1/chat/completions":
            return await super().route(request, body)
        seeds = tuple(body.get("seed", 0) + index for index in range(body.get("n", 1)))
        asked = Request(tuple(body["messages"]), seeds, body["temperature"], body["max_tokens"])
        written = await self.policy.complete(asked)
        choices = [
            {"index": i, "message": {"content": one.text}, "finish_reason": one.finish_reason}
            | ({"token_ids": self.ids(one.token_ids)} if body.get("return_token_ids") else {})
            for i, one in enumerate(written)
        ]
        usage = {"prompt_tokens": written[0].n_prompt_tokens + self.n_more}
        return web.json_response({"choices": choices, "usage": usage})


def sampled(run, policy, samples=8, **sampling):
    write_data(run.path.parent, 30)
    keys = {"prompts": 1, "samples": samples, "max_unparsed_rate": 1.0, **sampling}
    files = {name: str(run.path.parent / f"{name}.jsonl") for name in ("corpus", "questions")}
    return sample(recipe_of({**files, "split": "train"}, policy, **keys), run)


def trained_through_a_server(run, bpe, samples=8, **lies):
    """Return the report of sampling; a server lies about some values."""

    async def main():
        with closing(LocalPolicy(LocalPolicySettings(model=str(bpe)))) as policy:
            server = Returns(policy)
            for name, value in lies.items():
                setattr(server, name, value)
            async with serving(server, under="/v1") as urls:
                settings = {"kind": "openai", "model": server.models[0], "urls": urls, "max_tokens": 6}
                report = await asyncio.to_thread(sampled, run, {**settings, "retry_for_s": 0}, samples)
        await asyncio.to_thread(train, SFTRecipe(**SFT, init_from=str(bpe)), run)
        return report

    return asyncio.run(main())


@pytest.fixture
def trained_ids(monkeypatch):
    seen, encode = [], TokenEncoder.encode

    def recorded(self, *given, **how):
        encoded = encode(self, *given, **how)
        seen.extend(tuple(ids) for one in encoded for ids in one.completions)
        return encoded

    monkeypatch.setattr(TokenEncoder, "encode", recorded)
    return seen


@pytest.mark.parametrize("served", [False, True])
def test_trained_ids_are_sampled_ids_of_a_bpe_policy(bpe, tmp_path, trained_ids, served):
    run = Run.create(tmp_path / "run")
    if served:
        report = trained_through_a_server(run, bpe, samples=20)
    else:
        format_too = {"reward": {"parts": ["ap", "format"]}}  # without it a random policy has few pairs
        report = sampled(run, {"model": str(bpe), "max_tokens": 6}, samples=20, **format_too)
        train(SFTRecipe(**SFT, init_from=str(bpe)), run)
        n_targets = len(trained_ids)
        train(IPORecipe(max_steps=1, device="cpu"), run)
        assert len(trained_ids) > n_targets
    samples = [one for group in content(run) for one in group.samples]
    truth = {one.token_ids for one in samples}
    assert len(trained_ids) >= 400
    assert {*trained_ids} <= truth
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    again = [tuple(tokenizer(one.completion)["input_ids"]) for one in samples if one.is_cut]
    assert sum(ids not in truth for ids in again) > len(again) / 10  # encoded again, many texts have other ids
    assert report.cut == sum(one.is_cut for one in samples) > report.samples / 10
    assert any("raise policy.max_tokens" in note for note in report.notes)


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"ids": lambda ids: [9 for _ in ids]}, r"question q\d+: the sampler sent token ids of .* for the completion"),
        ({"n_more": 1}, "the sampler counted"),
    ],
    ids=["ids of another text", "prompt tokens"],
)
def test_a_server_with_another_tokenizer_is_refused_whatever_its_model_is_called(bpe, tmp_path, lies, says):
    run = Run.create(tmp_path / "run")
    with pytest.raises(TrainingError, match=says):
        trained_through_a_server(run, bpe, **lies)
    assert has_sampled_tokenizer(run, find_initial(run, str(bpe)))
    run.update(sampling={**run.manifest.sampling, "policy": {"kind": "openai", "model": "other", "urls": ["http://a"]}})
    assert not has_sampled_tokenizer(run, find_initial(run, str(bpe)))


def test_a_template_that_training_refuses_is_refused_at_sampling(bpe, tmp_path):
    broken = shutil.copytree(bpe, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text(TEMPLATE.replace("<|end|>", "."))
    run = Run.create(tmp_path / "run")
    with pytest.raises(PolicyError, match=r"a turn must end with a stop token \(<\|end\|>\)"):
        sampled(run, {"model": str(broken), "max_tokens": 6})
    assert content(run) == []
