import pytest
from pydantic import ValidationError

from leret.config.data import DataSettings, FileSettings, GeneratedSettings
from leret.extras.babilong import BabilongSettings

FILE = {"questions": "q.jsonl"}


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (FILE, FileSettings(questions="q.jsonl")),
        ({"kind": "babilong", **FILE}, BabilongSettings(questions="q.jsonl")),
        ({"kind": "world", "part": "1/2"}, GeneratedSettings(part="1/2")),
    ],
)
def test_kind_decides_the_class(section, settings):
    read = DataSettings.model_validate(section)
    assert (type(read), read) == (type(settings), settings)


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
