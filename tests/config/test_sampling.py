import pytest
from pydantic import ValidationError

from leret.config.base import free_keys
from leret.config.sampling import ProgramSettings, SamplingRecipe


def test_other_keys_of_the_program_go_to_its_constructor():
    assert ProgramSettings(path="p.py:P", hops=3).arguments == {"hops": 3}
    with pytest.raises(ValidationError, match=r"p\.py:ClassName"):
        ProgramSettings(path="p.py")


def test_keys_that_affect_samples_are_not_free():
    free = {"data.corpus", "policy.model", "retriever.index", "program.path", "pretrain"}
    free |= {"sampling.strategy", "sampling.concurrency", "sampling.max_error_rate"}
    deciding = {"data.kind", "data.seed", "data.split", "policy.temperature", "retriever.k"}
    deciding |= {"sampling.seed", "sampling.reward", "sampling.samples"}
    assert free_keys(SamplingRecipe) & (free | deciding) == free
