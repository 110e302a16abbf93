import json

import pytest

from leret.config.policy import LocalPolicySettings
from leret.policies.base import Request
from leret.policies.local.policy import LocalPolicy
from tests.tiny import tiny_policy


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("policies") / "tiny-llama")


@pytest.fixture(scope="module")
def policy(llama_dir):
    loaded = LocalPolicy(LocalPolicySettings(model=str(llama_dir)))
    yield loaded
    loaded.close()


def set_config(path, name="config.json", **values):
    file = path / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def ask(text, *seeds, temperature=1.0, max_tokens=8, stop=()):
    return Request(({"role": "user", "content": text},), seeds or (0,), temperature, max_tokens, stop=stop)
