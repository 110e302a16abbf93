import pytest

from tests.first_steps import refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--workers", "2"], "need --engine ray"), (["--address", "auto"], "need --engine ray"),
     (["--engine", "ray"], "needs --workers"),
     (["--engine", "ray", "--workers", "2", "--shard", "0/2"], "remove --shard"),
     (["--shard", "2/2", "--set", "data.limit=2"], "2/2")],
)  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(tmp_path, flags, says):
    assert says in refused("sample", "demo", "--run", tmp_path / "r", *flags)
