"""One run: from checked settings to a trained, validated or exported policy and a summary of it."""

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning import Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from grpo_lightning import memory
from grpo_lightning.callbacks.checkpoint import check_replaceable, export, upload
from grpo_lightning.checkpoint import lock, resume
from grpo_lightning.checkpoint.io import read_weights
from grpo_lightning.checkpoint.resume import check_weights, load_checkpoint, resume_command
from grpo_lightning.config import check_config, check_runtime, config_warnings
from grpo_lightning.config.rules import LIVE
from grpo_lightning.config.settings import value_at
from grpo_lightning.console import (
    describe_error,
    end_banner,
    is_first_process,
    log_line,
    redact_config,
    redact_overrides,
    single_line,
    utc_now,
    write_summary,
)
from grpo_lightning.data import PromptData, Source, check_readable, completion_limits
from grpo_lightning.data.datamodule import checked_rows, origin
from grpo_lightning.distributed import signals
from grpo_lightning.distributed.ranks import lost_contact
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.distributed.strategies import check_processes, is_externally_launched
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.module.base import StepModule
from grpo_lightning.reward import RewardError, RewardSpec, check_rows
from grpo_lightning.rollout.scoring import check_columns, show_inputs

log = logging.getLogger(__name__)

_CHECKED_ROWS = 10_000  # that rewards are tried on before a run


@dataclass(eq=False, repr=False)
class Run:
    """Module, data and trainer of some settings, built when they are first asked for.

    Raises:
        ConfigError: On construction, if the settings cannot work; nothing was loaded.
        ValueError: On construction, if several processes would do different things.
    """

    config: dict[str, Any]
    """Resolved settings as plain values."""
    build: Callable[..., Any]
    """(name of a part, further keywords of it) -> the objects that its settings describe."""
    overrides: Sequence[str] = field(kw_only=True)
    """What the user changed, for the summary."""
    directory_given: bool = field(kw_only=True)
    """Whether the user named the run directory, so that a run to continue can be in it."""
    multirun: bool = field(default=False, kw_only=True)
    """Whether this is one job of a sweep."""
    on_start: Callable[[Path], None] | None = field(default=None, kw_only=True)
    """Called with the run directory before it is first written to."""
    choices: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Which file of conf/ each part is of, for the summary."""
    written: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """The settings as checkpoints and logs have them; None: as they are."""

    change: Callable[[str, Any], None] | None = field(default=None, kw_only=True)
    """Changes a setting, and those that refer to it, of what is built from then on; None: none can be changed."""

    def __post_init__(self) -> None:
        check_config(self.config)
        check_runtime(self.config)
        check_processes(self.config, directory_given=self.directory_given, multirun=self.multirun)
        self.directory = Path(self.config["run_dir"])
        self._summary: dict[str, Any] = {}
        self._ended_metrics: Mapping[str, float] = {}
        self._has_started = False
        self._restores = False  # whether a method restores a checkpoint itself
        self._is_command = False

    def __repr__(self) -> str:
        from grpo_lightning import notebook

        return notebook.describe(self)

    def _repr_html_(self) -> str:
        from grpo_lightning import notebook

        return notebook.to_html(self)

    @cached_property
    def data(self) -> PromptData:
        """The prompts, as a ``LightningDataModule``: rewards and the environment can be called with its columns."""
        lightning.seed_everything(self.config["seed"], workers=True, verbose=False)
        self._announce("data")
        data: PromptData = self.build("data")
        is_fixed = self.config["data"]["_target_"] == LIVE or self._is_fixed("data.prompts_per_step")
        sources = data.load(training=self.config["mode"] != "validate", clamp=not is_fixed)
        self._take_over(data)
        rewards = self.build("reward")
        check_columns(rewards, self.build("environment"), data.columns)
        for source in sources if "rollout" in self.config["module"] else ():
            _check_answers(rewards, source)
        return data

    @cached_property
    def module(self) -> StepModule:
        """The ``LightningModule``, with the weights of ``checkpoint=``; of `data` the prompts remain that fit it."""
        data = self.data
        self._announce("policy")
        training, settings = self.config["mode"] != "validate", self.config["policy"]
        if is_loaded := settings["_target_"] == "grpo_lightning.policy.loading.load":
            from grpo_lightning.policy.loading import load_chat

            chat = load_chat(**settings)  # before the weights are read
            check_readable(data, chat, training=training)
            data.limit_prompts(lambda prompts: [len(ids) for ids in chat.tokenize(prompts)])
        policy = self.build("policy")
        if not is_loaded:
            check_readable(data, policy.chat, training=training)
        if not is_loaded or self.config.get("environment") is not None:  # which may show tools in every prompt
            data.limit_prompts(policy.count_tokens)
        self._take_over(data)
        for key, tokens in completion_limits(data, policy, self.config, fixed=self._is_fixed).items():
            cast(Any, self.change)(key, tokens)
        facts = {"overrides": redact_overrides(self.overrides), "choices": dict(self.choices)}
        module: StepModule = self.build(
            "module", policy=policy, settings=redact_config(self.written or self.config) | facts
        )
        data.follow(lambda: module.completed_steps)
        if not self._restores and (checkpoint := self._find_checkpoint(self.config)):
            check_weights(checkpoint, module)
            module.load_state_dict(read_weights(checkpoint), strict=module.strict_loading)
        return module

    def _is_fixed(self, key: str) -> bool:
        """Whether the user has set a key, so that it does not follow the data."""
        return self.change is None or any(word.lstrip("+").startswith(f"{key}=") for word in self.overrides)

    def _take_over(self, data: PromptData) -> None:
        """Change the settings where the data has fewer prompts than a step should have."""
        if self.change is not None and self.config["data"].get("prompts_per_step") != data.prompts_per_step:
            self.change("data.prompts_per_step", data.prompts_per_step)
            check_config(self.config)

    @cached_property
    def trainer(self) -> Trainer:
        """Lightning's trainer with the run's callbacks and loggers."""
        trainer: Trainer = self.build("trainer")
        signals.current_signals().launcher = trainer.strategy.launcher
        return trainer

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric, by name."""
        return dict(self.module.metrics) if "module" in vars(self) else dict(self._ended_metrics)

    def fit(self) -> "Run":
        """Train, from the checkpoint that the settings name or, called again, from the run's own last; returns itself.

        Raises:
            ValueError: The run directory holds another run, or the checkpoint cannot be used.
            Preempted: A signal, such as Ctrl-C or SIGTERM; the last complete step is saved.
        """
        if summary := resume.finished_summary(self._resumed_config(), self.directory):
            self._ended_metrics = summary.get("metrics", {})
            log.info("%s has made its %d steps: steps=N continues it", self.directory, summary["steps"])
            return self
        locked = lock.lock_run(self.config, self.directory) if is_first_process() else nullcontext()
        with locked, self._session("fit") as checkpoint:
            for warning in config_warnings(self.config) if is_first_process() else ():
                log.warning("%s", warning)
            module, trainer = self.module, self.trainer
            recorded: dict[str, Any] = {"events": {}, "config": module.settings}
            if checkpoint:
                recorded = resume.recorded_run(checkpoint, trainer, module.settings, is_adapter=module.base is not None)
            resume.warn_of_changes(recorded, module.settings, self.data.fingerprint())
            if is_first_process() and (checkpoint or not module.completed_steps):
                resume.rewind_logs(self.directory, trainer.loggers, recorded["events"], checkpoint=checkpoint)
            self._has_started = True
            memory.announce_memory(self.config, module, self.data, trainer)
            if is_first_process():
                show_inputs(module.policy, module.validation.scorer.rewards, self.data.train)
            if is_first_process() and not checkpoint and trainer.num_sanity_val_steps:
                log_line(f"validation: {len(self.data.validation)} held-out prompts, before the first step")
            trainer.fit(module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
        return self

    def validate(self) -> dict[str, float]:
        """Measure the policy, or the checkpoint's, on the held-out prompts; returns the metrics."""
        with self._session("validate") as checkpoint:
            module = self.module
            self.trainer.validate(module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True, verbose=False)
        return self.metrics

    def export(self) -> Path:
        """Write the policy, or the checkpoint's, in Hugging Face format, by one process; returns the directory."""
        directory = self.directory / "export"
        check_replaceable(directory, key="hydra.run.dir/export")
        with self._session("export") as checkpoint:
            module = self.module
            if is_first_process():
                load_checkpoint(module, checkpoint)
                adapter = bool(value_at(self.config, "callbacks.export.adapter"))
                export(module.policy, directory, metrics=module.metrics, settings=module.settings, adapter=adapter)
                log.info("exported to %s", directory)
                if name := value_at(self.config, "callbacks.export.push_to_hub"):
                    upload(directory, name)
        return directory

    def preflight(self) -> dict[str, Any]:
        """Say what the run would do, after a look at some of its prompts, and write ``preflight.json``."""
        from grpo_lightning import preflight

        with self._session("preflight") as checkpoint, isolate_rng():
            module, trainer = self.module, self.trainer
            load_checkpoint(module, checkpoint)
            return preflight.run_preflight(
                cast(GRPOLightningModule, module),
                self.data,
                trainer,
                prompts=self.config["preflight"]["prompts"],
                predicted=memory.announce_memory(self.config, module, self.data, trainer),
                directory=self.directory,
            )

    def execute(self) -> float:
        """Do what ``mode`` says and return ``metrics[sweep_metric]``, which a sweep maximizes: always finite.

        Raises:
            SystemExit: With status 130 after Ctrl-C, and 143 after SIGTERM, SIGHUP or SIGUSR1.
        """
        self._is_command = True
        try:
            getattr(self, self.config["mode"])()
        except Preempted as error:
            if is_first_process():
                log.warning("%s", error)
            # the first process is killed by Lightning when one that it has started ends otherwise than well
            sys.exit(error.exit_status if is_first_process() or is_externally_launched() else 0)
        if is_first_process() and self._summary:
            command = resume_command(self.overrides, self.directory, steps=2 * self.config["steps"])
            for line in end_banner(self._summary, self.config, self.directory, command, is_job=self.multirun):
                log_line(line)
        name = self.config["sweep_metric"]
        value = self.metrics.get(name, math.nan)
        if math.isfinite(value):
            return value
        if self.config["mode"] in ("fit", "validate"):
            log.warning("sweep_metric=%s was not measured; there are %s", name, single_line(", ".join(self.metrics)))
        return -sys.float_info.max

    def _announce(self, part: str) -> None:
        """Say what is loaded now, as that may take long."""
        if is_first_process():
            name, path = self.choices.get(part, "an object"), value_at(self.config, f"{part}.path")
            log_line(f"loading {part}: {name}{f', {path}' if path else ''}")

    def _resumed_config(self) -> dict[str, Any]:
        """The settings; once this object has trained, those that continue from its last checkpoint."""
        again = self._has_started and (self.directory / "checkpoints" / "last.ckpt").exists()
        return self.config | ({"checkpoint": "last"} if again else {})

    @contextmanager
    def _session(self, mode: str) -> Iterator[Path | None]:
        """Yields the checkpoint to start from; whatever happens inside, ``summary.json`` tells of it."""
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its hints about accelerators and products
        for part in ("callbacks", "profilers"):  # what the user has chosen has its say
            logging.getLogger(f"lightning.pytorch.{part}").setLevel(logging.INFO)
        warnings.filterwarnings("ignore", ".*(LeafSpec|sync_dist=True)")  # PyTorch's; values are the same everywhere
        self.directory.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        completed, config = self._completed_steps(), self._resumed_config()
        again = self._has_started and config["checkpoint"] == "last"
        checkpoint, steps, seconds, first = None, 0, 0.0, None
        if not completed or (mode == "fit" and again):  # else the policy as it is now goes on, or is measured
            checkpoint = self._find_checkpoint(config | {"mode": mode}, again=again)
        if mode == "fit":
            steps, seconds, first = resume.recorded_progress(checkpoint, self.directory)
        started, overrides = first or utc_now(), redact_overrides(self.overrides)
        if is_first_process():
            if mode == "fit":
                continues = checkpoint is not None and resume.belongs_to(checkpoint, self.directory)
                resume.remove_stale_files(self.directory, keep=checkpoint, completed=steps if continues else completed)
            if self.on_start is not None:
                self.on_start(self.directory)
        status, problem, self._restores = "failed", None, True
        with signals.handle_signals() as listener:
            try:
                if checkpoint:
                    check_weights(checkpoint, self.module)
                yield checkpoint
                made, needed = self._completed_steps(), self.config["steps"]
                status = "stopped" if mode == "fit" and made < needed else "finished"
                if status == "stopped" and is_first_process():
                    log.warning("a callback has ended the run after %d of %d steps", made, needed)
                if mode == "fit" and is_first_process() and (lack := self._lack_of_signal()):
                    log.warning("%s; mode=preflight shows completions with their rewards, and what to change", lack)
            except BaseException as error:
                if inputs := getattr(error, "inputs", None):  # a RewardError, here or in another process
                    sources = self.data.load(training=self.config["mode"] != "validate")
                    if place := _find(inputs, sources):
                        error = RewardError(f"{place}: {error}").with_traceback(error.__traceback__)
                lost = lost_contact(error)
                if asked := listener.preemption(error, is_consequence=lost is not None):
                    status = asked.status
                    saved = resume.describe_saved(mode, self.directory, self.overrides)
                    if mode == "fit" and not self._is_command:
                        saved = f"{saved.partition(';')[0]}; run.fit() goes on"
                    raise Preempted(asked.number, between_steps=asked.between_steps, saved=saved) from error
                problem = describe_error(lost or error)
                if lost:
                    raise lost from error
                raise error
            finally:
                from grpo_lightning.reward import workers  # loads pebble, which not every run needs to begin

                self._restores = False
                workers.close_loop()  # calls of rewards that nobody waits for any more
                is_built = "module" in vars(self)
                if is_first_process() and (is_built or not (self.directory / "summary.json").exists()):
                    self._summary = {
                        "metrics": dict(sorted(self.metrics.items())),
                        "values": self.module.summary() if is_built else {},
                        "steps": max(steps, self._completed_steps()) if is_built else 0,
                        "seconds": round(seconds + time.perf_counter() - start, 3),
                        "started": started,
                        "choices": dict(self.choices),
                        "overrides": overrides,
                        "status": status,
                        "error": problem,
                    }
                    write_summary(self.directory, self._summary, mode=mode)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _find_checkpoint(self, config: Mapping[str, Any], *, again: bool = False) -> Path | None:
        given = self.directory_given or again
        return resume.find_checkpoint(config, self.directory, directory_given=given, overrides=self.overrides)

    def _lack_of_signal(self) -> str | None:
        """What to say of a run in which rewards or gradients were 0 in every step; None of any other."""
        zeros = {name for name, one in self.module.history.items() if one.min == one.max == 0}
        is_still, has_no_advantage = "optim/grad_norm" in zeros, {"advantage/mean", "advantage/std"} <= zeros
        if not is_still and not has_no_advantage:
            return None
        cause = "every advantage was 0" if has_no_advantage else "every gradient was 0"
        if has_no_advantage and "reward/total" not in self.module.history.keys() - zeros:
            cause = "no completion was rewarded"
        is_unchanged = is_still and not value_at(self.config, "optimizer.weight_decay")
        return f"{cause}: {'the weights are unchanged' if is_unchanged else 'nothing was learned from rewards'}"

    def _completed_steps(self) -> int:
        return int(self.module.completed_steps) if "module" in vars(self) else 0


def _check_answers(rewards: Mapping[str, RewardSpec], source: Source) -> None:
    """Refuse right answers and settings of rewards that are of no use, before weights load."""
    rows = checked_rows(source, 0)[:_CHECKED_ROWS]
    try:
        check_rows(rewards, [source[index] for index in rows])
    except RewardError as error:
        where = "" if error.row is None else f"{origin(source, rows[error.row])}: "
        raise RewardError(f"{where}{error}") from error


def _find(inputs: Mapping[str, Any], sources: Sequence[Source]) -> str | None:
    """Where the row comes from whose prompt and columns are these; None for rows that are made on access."""
    for source in sources:
        for index in checked_rows(source, 0):
            prompt, columns = source[index]
            if prompt == inputs["prompts"] and all(inputs.get(name) == value for name, value in columns.items()):
                return origin(source, index)
    return None
