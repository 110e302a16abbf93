"""Keys of services go only to their own addresses."""

import asyncio
from contextlib import suppress

import pytest

from leret.config.base import KeyVariable, mark_of, secrets_in
from leret.config.policy import PolicySettings
from leret.config.retriever import RetrieverSettings
from leret.core.errors import LeretError
from leret.policies.base import Request
from leret.policies.load import make_policy
from leret.retrieval.load import load_retriever
from tests.http.servers import serving
from tests.keyed import DEFAULTS, SECRET, Recorder, at, keyed, variables
from tests.tiny import tiny_policy


def test_each_key_that_names_a_variable_is_marked():
    assert {(model.__name__, name) for model, name, field in variables() if not mark_of(field, KeyVariable)} == set()
    kinds = {model.model_fields["kind"].default for model, _ in keyed()}
    assert kinds == {"openai", "tgi", "together", "tinker", "remote", "pubmed"}


@pytest.mark.parametrize(("model", "name"), keyed(), ids=lambda value: getattr(value, "__name__", value))
def test_a_default_variable_is_only_for_its_service(model, name):
    for url in ("http://127.0.0.1:9/v1", "http://api.together.ai/v1", "https://api.together.ai.evil.org/v1"):
        assert getattr(model.model_validate(at(model, url)), name) is None
    [(variable, urls)] = secrets_in(model.model_validate(at(model, "http://127.0.0.1:9/v1", **{name: "MY_KEY"})))
    assert (variable, "http://127.0.0.1:9" in str(urls)) == ("MY_KEY", True)


def test_services_keep_their_default_variables(monkeypatch):
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    settings = [
        PolicySettings.model_validate({"kind": "together", "model": "x"}),
        PolicySettings.model_validate({"kind": "together", "model": "x", "urls": ["https://api.together.ai/v1/"]}),
        PolicySettings.model_validate({"kind": "tinker", "model": "x"}),
        RetrieverSettings.model_validate({"kind": "pubmed"}),
    ]
    found = [variable for one in settings for variable, _ in secrets_in(one)]
    assert found == ["TOGETHER_API_KEY", "TOGETHER_API_KEY", "TINKER_API_KEY", "NCBI_API_KEY"]
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9/")
    assert settings[2].model_validate({"kind": "tinker", "model": "x"}).api_key_env == "TINKER_API_KEY"


@pytest.mark.parametrize("model", [model for model, _ in keyed()], ids=lambda model: model.__name__)
def test_no_default_key_reaches_another_server(model, tmp_path, monkeypatch):
    for variable in DEFAULTS:
        monkeypatch.setenv(variable, SECRET)
    recorder = Recorder()

    async def main():
        async with serving(recorder) as [url]:
            settings = model.model_validate(at(model, url))
            if issubclass(model, PolicySettings):
                if "tokenizer" in model.model_fields:
                    settings = settings.model_copy(update={"tokenizer": str(tiny_policy(tmp_path))})
                request = Request(({"role": "user", "content": "Hello"},), (1,), 1.0, 8)
                work = make_policy(settings).complete(request)
            else:
                keys = {"retry_for_s": 0.0, "timeout_s": 2.0}
                used = settings.model_copy(update=keys)
                work = asyncio.to_thread(lambda: load_retriever(used, None, tmp_path).search(["heart"], 1))
            with suppress(LeretError, TimeoutError):
                await asyncio.wait_for(work, 20)

    asyncio.run(main())
    sent = [path for path in recorder.paths if not path.endswith("/healthz")]
    assert sent, "no request with a key could arrive, so this proves nothing"
    assert [request for request in recorder.seen if SECRET in request] == []
