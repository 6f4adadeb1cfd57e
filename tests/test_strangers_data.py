"""A directory of a stranger's data set reads no files but its own."""

import pytest

from grpo_lightning.data.hub import Hub
from tests.support.provocations import provocation


@pytest.fixture
def place(tmp_path):
    directory = tmp_path / "data"
    (directory / "part").mkdir(parents=True)
    (directory / "part" / "own.jsonl").write_text('{"prompt": "own"}\n')
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    return directory


def configured(place, settings, file="README.md"):
    text = f"configs:\n- config_name: default\n  {settings}\n"
    (place / file).write_text(f"---\n{text}---\n" if file == "README.md" else text)
    return Hub(str(place), "train")


@provocation(
    "a data set's directory whose README names an absolute path, `..`, a URL or `reference::FILE` in `data_files`",
    "refused in one sentence; nothing outside the directory is read",
)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "settings",
    [
        "data_files: {0}/secret.jsonl",
        "data_files: ../secret.jsonl",
        "data_files: part/../../secret.jsonl",
        "data_files: ['part/*', '../*.jsonl']",
        "data_files: [{{split: train, path: {0}/secret.jsonl}}]",
        "data_files: [{{split: train, path: ['part/*', 'file://{0}/secret.jsonl']}}]",
        "data_files: 'file:{0}/secret.jsonl'",
        "data_files: 'http://localhost:1/secret.jsonl'",
        "data_files: 'reference::part/own.jsonl'",
        "data_dir: {0}",
        "data_dir: ..",
    ],
)
def test_files_of_a_data_set_lie_in_its_directory(settings, file, place, tmp_path):
    with pytest.raises(ValueError, match=r"is not in this directory; allowed are relative paths") as error:
        configured(place, settings.format(tmp_path), file)
    assert str(error.value).startswith(f"data.path='{place}', data.split='train': {file}: data_")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", ["data_files: part/*.jsonl", "data_dir: part"])
def test_files_inside_are_read(settings, place):
    (place / "other.jsonl").write_text('{"prompt": "other"}\n')
    rows = configured(place, settings)
    assert [rows[i] for i in range(len(rows))] == [("own", {})]
