import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.report import curve, find_runs, labels, main


def write_run(directory, overrides, values):
    directory.mkdir(parents=True)
    summary = {"metrics": {}, "steps": 2, "seconds": 7.2, "overrides": overrides, "status": "finished"}
    (directory / "summary.json").write_text(json.dumps(summary))
    writer = SummaryWriter(str(directory / "tensorboard"))
    for step, value in enumerate(values):
        writer.add_scalar("val/pass@1", value, step)
    writer.close()


def test_a_sweep_is_told_apart_by_what_differs(tmp_path, capsys):
    write_run(tmp_path / "0", ["steps=2", "seed=0"], [0.25, 0.5])
    write_run(tmp_path / "1", ["steps=2", "seed=1"], [0.125, 0.75])
    runs = find_runs(tmp_path)
    assert list(labels(runs).values()) == ["seed=0", "seed=1"]
    assert curve(tmp_path / "1", "val/pass@1") == [(0, 0.125), (1, 0.75)]
    assert curve(tmp_path / "1", "reward/total") == []
    main([str(tmp_path), "--plot", str(tmp_path / "new" / "curve.png")])
    printed = capsys.readouterr().out
    assert "0.250 → 0.500" in printed
    assert "0.125 → 0.750" in printed
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_is_named_by_its_directory_and_none_is_an_error(tmp_path):
    write_run(tmp_path / "mine", ["seed=0"], [0.5])
    assert list(labels(find_runs(tmp_path / "mine")).values()) == ["mine"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no summary\.json"):
        find_runs(tmp_path / "empty")
