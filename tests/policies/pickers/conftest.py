import pytest

from leret.config.policy import PolicySettings
from leret.policies.load import make_policy
from leret.policies.pickers.picker import Picker
from tests.policies.pickers import stories


@pytest.fixture
def picker():
    pickers = []

    def make(kind="encoder", **settings):
        defaults = {"features": f"{stories.__name__}:numbers"} if kind == "features" else {"positions": "relative"}
        policy = make_policy(PolicySettings.model_validate({"kind": kind, **defaults, **settings}))
        assert isinstance(policy, Picker)
        policy.fit([stories.story(), stories.story([2])])
        pickers.append(policy)
        return policy

    yield make
    for one in pickers:
        one.close()
