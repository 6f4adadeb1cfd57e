"""What Hydra itself would run is checked as soon as it has read it, before it logs, calls back or sweeps."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra._internal import hydra as hydra_internal
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning import start
from grpo_lightning.composition import CONF
from grpo_lightning.composition.brought_files import brought_problems, is_trusted, misplaced
from grpo_lightning.composition.directories import (
    link_of_sweep,
    no_place,
    no_place_of_job,
    use_new_folder,
    without_effect,
)
from grpo_lightning.composition.environment import remember_secrets, remember_words
from grpo_lightning.composition.file_rules import hydra_problems, shape_problems
from grpo_lightning.composition.found import SettingsRefused, is_brought, is_hydras_own
from grpo_lightning.composition.hydra_settings import (
    BASIC_LAUNCHER,
    foreign_parts,
    only_composes,
    problems,
    script_problems,
)
from grpo_lightning.composition.job_name import job_name, words_of
from grpo_lightning.composition.resolvers import known_only, resolver_problems
from grpo_lightning.composition.said import changed, taken_for_choices
from grpo_lightning.composition.selected import selected
from grpo_lightning.distributed import fresh
from grpo_lightning.output import redaction, shell
from grpo_lightning.output.files import replace
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.suggestions import explain, known_keys

_PLACE, _NAME = re.compile(r"(file://)?[^:]*"), re.compile(r"[\w.+-]+")
_of_others: ContextVar[Sequence[str]] = ContextVar("_of_others", default=())


class CheckedLoader(ConfigLoaderImpl):
    """Composes settings as Hydra does, and refuses those of its own that would run code."""

    _said: Sequence[str] | None = None
    """While a job of a sweep is composed, what the command itself says: parameters may stand in a file."""
    runs = shows = False
    """Whether what is composed is run then, so that a directory is made for it, and not only shown."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """The composed settings.

        Raises:
            ConfigCompositionException: They cannot be composed, or Hydra's own part of them is refused; one text
                without a traceback.
        """
        remember_words(overrides)
        said = [word for word in overrides if word not in _of_others.get()] if self._said is None else self._said
        self._trusts, self._brought = is_trusted(said), set[str]()
        self._listed = list[tuple[ResultDefault, Any]]()
        try:
            with known_only():  # lists of defaults are resolved, whoever has written them
                composed = super().load_configuration(
                    config_name, overrides, run_mode, from_shell, validate_sweep_overrides
                )
        except SettingsRefused as error:
            raise SettingsRefused(redaction.hide(str(error))) from None
        except HydraException as error:
            raise ConfigCompositionException(redaction.hide(explain(error, CONF, known_keys(CONF), said))) from None
        except Exception as error:  # of YAML and OmegaConf, about ten kinds, whose words may be a stranger's
            told = one_line(f"{type(error).__name__}: {error}")
            raise ConfigCompositionException(redaction.hide(f"the settings cannot be composed: {told}")) from None
        if foreign := foreign_parts(composed):
            raise ConfigCompositionException(_listed(foreign))
        note_sources(composed.hydra, said)
        if start.settings_from():  # which would say what a ``${…}`` of the command stands for in a directory's name
            named: Any = OmegaConf.to_container(composed.hydra.job, resolve=False)
            composed.hydra.job.override_dirname = str(named["override_dirname"]).replace("${", "{")
        wrong = problems(OmegaConf.to_container(composed.hydra, resolve=False))
        settings: Any = OmegaConf.to_container(composed, resolve=False)
        own = {key: part for key, part in settings.items() if key != "hydra"}
        if start.settings_from():
            wrong += changed(OverridesParser.create().parse_overrides(overrides), own, self._is_group)
        wrong += [
            f"{one_line(str(one.parent))}: places {one.config_path} at {one_line(one.package or 'the top')}; allowed "
            "is where it stands in conf/"
            for one, header in self._listed
            if one.parent in self._brought and misplaced(one, header)
        ]
        wrong += resolver_problems(own)
        if wrong := wrong or script_problems(composed.hydra.launcher):
            raise ConfigCompositionException(_listed(wrong))
        if linked := link_of_sweep(composed):
            raise ConfigCompositionException(linked)
        if from_shell and composed.hydra.launcher.get("_target_") != BASIC_LAUNCHER:  # else no job is launched
            fresh.protect_jobs()
            use_new_folder(composed)
            if "setup" in composed.hydra.launcher:  # of SLURM, which may be set up to hand on no variables
                composed.hydra.launcher.setup = [fresh.in_a_shell()]
        remember_secrets(composed, _values(composed) if self.shows else None)
        is_run = self.runs and validate_sweep_overrides  # else Hydra asks for its mode alone
        if is_run and (obstacle := without_effect(composed, overrides) or no_place(composed)):
            raise ConfigCompositionException(redaction.hide(obstacle))
        if "$" not in (program := shell.program()):  # elsewhere a train.py may be somebody else's
            composed.hydra.help.template = str(composed.hydra.help.template).replace("python train.py", program)
        return composed

    def get_group_options(self, *args: Any, **options: Any) -> list[str]:
        """The names of files that there are, which may be a stranger's: those that a word can choose by their name.

        ``KEY=glob(*)`` would make others, such as ``{a: b}``, words of the command.
        """
        return [name for name in super().get_group_options(*args, **options) if _NAME.fullmatch(name)]

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The settings of one job, whose ``hydra.job.override_dirname`` says what it differs in from the others.

        What the command says comes last, so that no parameter of a file's (``++policy.path``) takes its place.
        """
        _hide_in(Path(master_config.hydra.sweep.dir) / "multirun.yaml")  # before a job can be refused
        asked = {word.partition("=")[0]: word for word in words_of(master_config)}  # the last one counts
        sweep_overrides = sorted(sweep_overrides, key=lambda word: word.partition("=")[0] in asked)
        self._said = [*asked.values()]
        try:
            composed = super().load_sweep_config(master_config, sweep_overrides)
        finally:
            self._said = None
        job, words = composed.hydra.job, words_of(composed)
        named = job.config.override_dirname
        common = [key for word in words if _is_same(word, asked.get(key := word.partition("=")[0], ""))]
        with open_dict(composed):
            if len(common) < len(words):
                named.exclude_keys = [*named.exclude_keys, *common]
            name = job_name(words, hidden=named.exclude_keys, shown=redaction.redacted_words(words))
            job.override_dirname = name.replace("${", "{") if start.settings_from() else name
        if obstacle := no_place_of_job(composed):
            raise ConfigCompositionException(redaction.hide(obstacle))
        return composed

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        """One file of settings, which says nothing that only the command may say."""
        loaded = super()._load_single_config(default, repo)
        said: Any = OmegaConf.to_container(loaded.config, resolve=False)
        said = said if isinstance(said, dict) else {}
        file, wrong = ConfigSource._normalize_file_name(default.config_path or ""), list[str]()
        was_brought = is_brought(default, loaded, is_noted=not self._trusts) and not self._trusts
        wrong += shape_problems(file, said)
        if "hydra" in said and not is_hydras_own(default, loaded):
            wrong += hydra_problems(file, said["hydra"])
        if was_brought:
            self._brought.add(default.config_path or "")
            wrong += brought_problems(file, said, loaded.defaults_list or ())
        else:
            self._listed.append((default, loaded.header))
        if wrong:
            raise SettingsRefused(_listed(wrong))
        return loaded

    def _parse_overrides_and_create_caching_repo(self, config_name: str | None, overrides: list[str]) -> Any:
        """The overrides, none of which Hydra mistakes for the choice of a file, and where it looks for files."""
        parsed, repo = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        if wrong := list(taken_for_choices(parsed, repo)):
            raise SettingsRefused(_listed(wrong))
        self._is_group = repo.group_exists
        return parsed, repo

    def _process_config_searchpath(self, config_name: str | None, parsed_overrides: Any, repo: Any) -> None:
        """Refuse places of settings other than directories before they are looked into: packages would be imported."""
        primary = repo.load_config(config_path=config_name) if config_name else None
        listed = [OmegaConf.select(primary.config, "hydra.searchpath")] if primary else []
        listed += [word.value() for word in parsed_overrides if word.get_key_element() == "hydra.searchpath"]
        for place in (place for places in listed for place in places or ()):
            if not _PLACE.fullmatch(str(place)):
                raise SettingsRefused(f"hydra.searchpath={place}: allowed are directories, file:///home/me/conf")
        super()._process_config_searchpath(config_name, parsed_overrides, repo)


@contextmanager
def overrides_of_others(words: Sequence[str]) -> Iterator[None]:
    """Inside, these are no words of the user's, such as those of a run that may be a stranger's."""
    before = _of_others.set(words)
    try:
        yield
    finally:
        _of_others.reset(before)


def note_sources(hydra: DictConfig, words: Sequence[str] = ()) -> None:
    """Take note of the directories of settings that a command has brought along, as Hydra's own settings list them.

    Args:
        hydra: Hydra's own settings.
        words: The user's overrides, which may say that the settings are the user's own.
    """
    if is_trusted(words):
        return
    sources: Any = OmegaConf.to_container(hydra.runtime.config_sources, resolve=False)  # a name may hold ${…}
    found = [str(source["path"]) for source in sources if source["schema"] == "file"]
    start.note_settings_from(path for path in found if Path(path).resolve() != CONF.resolve())


def _is_same(word: str, said: str) -> bool:
    """Whether a job's override is one of the command, of which a sweeper writes ``true`` as ``True``."""
    is_switch = said.partition("=")[2].lower() in ("true", "false", "null", "none")
    return word == said or (is_switch and word.lower() == said.lower())


def install(*, runs: bool = False, shows: bool = False) -> None:
    """Let Hydra compose by `CheckedLoader`, and run what it composes, or show it with all values."""
    start.forget_settings_from()
    hydra_internal.ConfigLoaderImpl = CheckedLoader  # type: ignore[attr-defined]
    CheckedLoader.runs, CheckedLoader.shows = runs, shows


@contextmanager
def installed() -> Iterator[None]:
    """Inside, Hydra composes by `CheckedLoader`; afterwards, in a program that has settings of its own, as before.

    Nothing of what Hydra's own settings name is run by composing, so nothing is imported for them either. And Hydra
    looks at lists of defaults more than once, and resolves them.
    """
    before, told = hydra_internal.ConfigLoaderImpl, only_composes.set(True)  # type: ignore[attr-defined]
    install()
    fresh.protect_processes()
    try:
        with known_only():
            yield
    finally:
        only_composes.reset(told)
        hydra_internal.ConfigLoaderImpl = before  # type: ignore[attr-defined]


def _values(composed: DictConfig) -> dict[str, Any]:
    """All settings but Hydra's own, with what they refer to, as far as it is there."""
    found = dict[str, Any]()
    for name in composed:
        with suppress(OmegaConfBaseException):
            if name != "hydra":
                found[str(name)] = selected(composed, str(name))
    return found


def _listed(wrong: Sequence[str]) -> str:
    return "the settings cannot work:\n" + "\n".join(f"  {one}" for one in wrong)


def _hide_in(file: Path) -> None:
    """Take the secrets out of what Hydra has written of a sweep."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if (hidden := redaction.hide(text)) != text:
        replace(file, hidden, by=f".{file.name}")
