from leret.config.base import free_keys
from leret.config.sampling import SamplingRecipe


def test_keys_that_affect_samples_are_not_free():
    free = {"data.corpus", "policy.model", "retriever.index", "program.path", "pretrain"}
    free |= {"sampling.strategy", "sampling.concurrency", "sampling.max_error_rate"}
    deciding = {"data.kind", "data.seed", "data.split", "policy.temperature", "retriever.k"}
    deciding |= {"sampling.seed", "sampling.reward", "sampling.samples"}
    assert free_keys(SamplingRecipe) & (free | deciding) == free
