import pytest

from leret.core.errors import PolicyError, TrainingError
from leret.policies.local.batching import BatchWorker


def doubled(items):
    if 99 in items:
        raise ValueError("a shape is wrong")
    return [TrainingError("its own") if item < 0 else 2 * item for item in items]


def test_a_fault_fails_its_item_or_batch_only():
    def plan(items):
        return [[i] for i in sorted(range(len(items)), key=lambda i: items[i])]

    worker = BatchWorker(doubled, plan, name="doubler")
    futures = [*worker.submit([1]), *worker.submit([-1, 99, 3])]
    worker.close()
    worker.close()
    assert (futures[0].result(), futures[3].result()) == (2, 6)
    with pytest.raises(TrainingError, match="its own"):
        futures[1].result()
    with pytest.raises(PolicyError, match="ValueError: a shape is wrong"):
        futures[2].result()
    with pytest.raises(PolicyError, match="doubler is closed"):
        worker.submit([1])
