import pytest
from pydantic import ValidationError

from leret.config.evaluation import EvalRecipe
from leret.config.sampling import RewardSettings


@pytest.mark.parametrize(
    "measures",
    [["f1", {"similarity": {"model": "m"}}], {"f1": None, "similarity": {"model": "m"}},
     [{"f1": None, "similarity": {"model": "m"}}]],
)  # fmt: skip
def test_measures_take_settings_as_the_parts_of_a_reward_do(measures):
    recipe = EvalRecipe(measures=measures)
    assert recipe.specs == {"f1": "f1", "similarity": RewardSettings(parts={"similarity": {"model": "m"}})}
    assert EvalRecipe.model_validate(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("measures", one) for one in ([{"f1": 2.0}], [{"f1": {"weight": 0.5}}], [{}], 3, [[1]])),
     ("reader", {"policy": {"kind": "features"}})],
)  # fmt: skip
def test_a_measure_with_a_weight_or_of_another_form_and_a_picker_as_reader_are_refused(key, value):
    with pytest.raises(ValidationError, match=key):
        EvalRecipe(**{key: value})
