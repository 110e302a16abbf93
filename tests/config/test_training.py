"""Keys of a training recipe that exclude or need each other."""

import pytest
from pydantic import ValidationError

from leret.config.training import LoraSettings
from leret.training.algorithms.sft import SFTRecipe


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio and warmup_steps exclude each other"),
        ({"max_steps": 3, "match_steps_of": "ipo"}, "max_steps and match_steps_of exclude each other"),
        ({"lora": LoraSettings(quantization="nf4")}, "nf4 computes in bfloat16; set dtype: bfloat16 too"),
        ({"name": "a/b"}, "'a/b' cannot name a policy"),
        ({"lora": {"quantization": "int3"}}, "lora.quantization"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, says):
    with pytest.raises(ValidationError, match=says):
        SFTRecipe.model_validate(keys)


def test_a_quantized_base_goes_with_bfloat16():
    assert SFTRecipe(dtype="bfloat16", lora=LoraSettings(quantization="nf4")).lora.quantization == "nf4"
