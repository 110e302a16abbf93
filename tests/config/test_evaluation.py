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


def test_a_picker_is_refused_as_a_reader():
    with pytest.raises(ValidationError, match=r"reader.policy\n.*kind features is a picker"):
        EvalRecipe(reader={"policy": {"kind": "features"}})


@pytest.mark.parametrize("measures", [[{"f1": 2.0}], [{"f1": {"weight": 0.5}}], [{}], 3, [[1]]])
def test_a_measure_with_a_weight_or_of_another_form_is_refused(measures):
    with pytest.raises(ValidationError, match="measures"):
        EvalRecipe(measures=measures)
