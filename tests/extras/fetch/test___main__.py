from leret.extras.fetch.__main__ import main


def test_an_output_below_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "list.txt").write_text("http://127.0.0.1:9/x\n")
    assert main([str(tmp_path / "list.txt"), "--out", str(tmp_path / "list.txt" / "a")]) == 2
    assert "list.txt/a cannot be written" in capsys.readouterr().err
