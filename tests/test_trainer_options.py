"""Options of Lightning's Trainer that would end or thin a run are refused, with what does it here."""

from typing import Any

import pytest

from grpo_lightning.config import ConfigError, check_config
from grpo_lightning.config.consistency import OPTIONS
from tests.support.composed import CONF, composed
from tests.test_settings import problems

VALUES = {"max_time": "00:04:00:00", "gradient_clip_algorithm": "value", "model_registry": "mine"}
"""Option -> a value that a user may think of; of the others it is 0, 1, 2 or the other of true and false."""


def with_option(option: str, value: Any) -> dict[str, Any]:
    config = composed()
    return config | {"trainer": config["trainer"] | {option: value}}


def test_options_that_end_or_thin_a_run_are_refused():
    firsts = {option: allowed[0] for option, (allowed, _) in OPTIONS.items()}
    others = {option: not first if isinstance(first, bool) else 2 for option, first in firsts.items()} | VALUES
    for option, value in [
        *others.items(),
        ("limit_val_batches", 0),
        ("limit_train_batches", 0.5),
        ("max_epochs", None),
    ]:
        with pytest.raises(ConfigError) as error:
            check_config(with_option(option, value))
        (found,) = error.value.problems
        said = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        assert found.startswith(f"trainer.{option}={said}: allowed is ")
        assert found.endswith(OPTIONS[option][1])


@pytest.mark.slow
def test_what_the_settings_files_have_and_what_changes_nothing_is_allowed():
    for trainer in (path.stem for path in (CONF / "trainer").glob("*.yaml")):
        check_config(composed(f"trainer={trainer}"))
    for option, (allowed, _) in OPTIONS.items():
        for value in allowed:
            check_config(with_option(option, value))
    for option, value in {"detect_anomaly": True, "benchmark": True, "deterministic": "warn"}.items():
        check_config(with_option(option, value))


def test_an_option_of_the_command_line_is_refused():
    assert problems("+trainer.max_steps=3") == (
        "trainer.max_steps=3: allowed is -1; the run ends after steps=N rollouts",
    )
