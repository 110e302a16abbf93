import pytest
from pydantic import ValidationError

from leret.config.data import DataSettings

FILE = {"questions": "q.jsonl"}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({**FILE, "sentences": 50}, r"sentences\n +Extra inputs"),
        ({"kind": "babilong", **FILE, "sentences": 50}, r"data\.noise is missing"),
        ({"kind": "world", "part": "2/2"}, "part 2 of 2 does not exist"),
    ],
)
def test_keys_of_another_kind_are_refused(section, says):
    with pytest.raises(ValidationError, match=says):
        DataSettings.model_validate(section)
