"""Where Hydra has found a file of settings, and whether it is one that was brought along."""

from importlib import resources
from pathlib import Path

from hydra.core.default_element import ResultDefault
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource

from grpo_lightning import start
from grpo_lightning.composition import CONF
from grpo_lightning.output.terminal import one_line


class SettingsRefused(ConfigCompositionException):
    """Settings that are refused while Hydra composes them; the text is for the user as it stands."""


def is_brought(default: ResultDefault, loaded: ConfigResult, *, is_noted: bool) -> bool:
    """Whether a file is none of conf/; takes note of one in no directory of settings (``experiment=../../theirs``).

    Raises:
        SettingsRefused: It is none of Hydra's, and is found from among them, where Hydra looks first.
    """
    root, file = _place(default, loaded)
    if root is None:
        return False
    is_below = file.is_relative_to(root)
    is_file = loaded.path.startswith("file://")
    if not is_file:
        if not is_below:
            raise SettingsRefused(
                f"{one_line(str(default.config_path))}: leads from Hydra's own settings to {one_line(str(file))}; "
                "allowed are settings of conf/ and of --config-dir DIR"
            )
        return False
    if not is_below and is_noted:
        start.note_settings_from([str(file.parent)])
    return root != CONF.resolve() or not is_below


def is_hydras_own(default: ResultDefault, loaded: ConfigResult) -> bool:
    """Whether a file is this project's first one, or one of Hydra's and its plug-ins' where it is meant to stand."""
    path, package = default.config_path or "", default.package or ""
    if loaded.path.startswith("file://"):
        return loaded.path == f"file://{CONF}" and path == "train" and not package
    meant = (loaded.header or {}).get("package") or path.rpartition("/")[0].replace("/", ".")
    return path == "hydra/config" or (path.startswith("hydra/") and package == meant)


def _place(default: ResultDefault, loaded: ConfigResult) -> tuple[Path | None, Path]:
    """The directory in which Hydra has found a file, None for settings that are no file, and what it has read.

    Links are followed as Hydra does it itself, which is not always what the operating system does.
    """
    kind, _, place = loaded.path.partition("://")
    if kind not in ("file", "pkg"):
        return None, Path()
    root = Path(place if kind == "file" else str(resources.files(place))).resolve()
    name = ConfigSource._normalize_file_name(default.config_path or "")
    return root, (root / name).resolve()
