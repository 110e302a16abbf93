from benchmarks.cost.walk import walk_of_a_sample
from leret.retrieval import batching


def test_a_new_sample_passes_few_files_and_calls(monkeypatch):
    monkeypatch.setattr(batching, "_QUICK_S", batching._QUICK_S)  # restores what the count sets
    # What another test left behind, such as an object that is collected now, may add a call to one of them.
    calls = min((walk_of_a_sample() for _ in range(2)), key=len)
    assert {"rollouts/states.py", "rollouts/walk.py", "sampling/store/store.py"} <= {file for file, _ in calls}
    files = {file for file, _ in calls}
    assert len(files) <= 18, sorted(files)
    assert len(calls) <= 50
