"""An environment with its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_lightning.config.rules import ENVIRONMENT, problems
from grpo_lightning.environment.answer import shown
from grpo_lightning.environment.call import attribute, name_of
from grpo_lightning.environment.episodes import Episodes
from grpo_lightning.environment.played import is_generator
from grpo_lightning.reward.spec import is_coroutine_function

if TYPE_CHECKING:  # batch imports torch, which worker processes can do without
    from grpo_lightning.types import Prompt


@dataclass(frozen=True)
class Environment:
    """Whom the model talks to: a function of what it has said so far, and how the function is called.

    ``function`` takes by name what it needs of ``turns`` (the model's turns so far, texts, the last is new),
    ``replies`` (what it was told in between, one less), ``prompt`` (as rewards get it), ``rng`` (a `random.Random` that
    is the same in every call for the same completion of the same step) and the columns of the row; all of it if it has
    ``**kwargs``. What it gets are copies. It returns

    * a text, which is replied;
    * a finite number: the episode is over, with this score;
    * None: the episode is over, and the rewards judge it;
    * a text and a finite number, as a tuple: a reply, and the score of the turn.

    It has to return the same for the same arguments, since it may be called in any process.

    Raises:
        ValueError: On construction, naming the field: ``function`` cannot be called as an environment, or a setting is
            out of range.
    """

    function: Callable[..., Any]
    max_turns: int
    """The most turns of the model in one episode. After the last one the function is asked for its score, not for a
    reply."""
    timeout: float | None = None
    """Seconds for one call, in a worker process that is ended after them; None: it is called in this process."""
    max_failed: float = 0.5
    """The largest fraction of the episodes in which a call may raise, take too long, break its worker or return
    something else."""
    failed_score: float | None = None
    """The score of those episodes; None: they are left out of their group."""
    max_reply: int = 10_000
    """Characters of a reply; longer ones are cut and say so."""
    role: str | None = None
    """Who replies, user or tool; None: what the function's attribute ``role`` says or, without one, the policy's
    ``reply_role``."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function: expected a callable (`_partial_: true` in YAML), got {self.function!r:.80}")
        if is_generator(self.function):
            raise ValueError(
                f"function: {name_of(self.function)} is a generator function (it has yield), which environment=played "
                "and grpo_lightning.environment.Played take"
            )
        if is_coroutine_function(self.function):
            raise ValueError(
                f"function: {name_of(self.function)} is a coroutine function (async def): allowed are functions that "
                "return their answer"
            )
        if wrong := problems(ENVIRONMENT, {**vars(self), "role": self.reply_role}):
            raise ValueError("; ".join(wrong))
        if self.tools is not None and not _are_schemas(self.tools):
            raise ValueError(
                f"tools: expected JSON schemas of functions, such as {{'type': 'function', 'function': {{'name': …}}}} "
                f"as attribute of {self.name}, got {shown(self.tools)}"
            )

    @property
    def name(self) -> str:
        """The dotted path of its function."""
        return name_of(self.function)

    @property
    def reply_role(self) -> str | None:
        """Who replies, user or tool; None: what the policy's settings say."""
        return attribute(self.function, "role") if self.role is None else self.role

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """JSON schemas of the tools that the chat template shows in the prompt; None: there are none."""
        tools: Sequence[Mapping[str, Any]] | None = attribute(self.function, "tools")
        return tools

    def episodes(
        self,
        prompts: "Sequence[Prompt]",
        columns: Mapping[str, Sequence[Any]],
        seeds: Sequence[tuple[int, int, int]],
        poll: Callable[[], None] | None = None,
    ) -> Episodes:
        """Begin an episode for every completion of a rollout.

        Args:
            prompts: [B] the prompt of each completion.
            columns: Name -> [B] what else the data set knows of the row.
            seeds: [B] (the step's seed, number of the prompt, number of the completion in its group): what ``rng`` is a
                function of.
            poll: Called while workers are waited for; may raise to give up.

        Raises:
            EpisodeError: What `check_columns` finds, or arguments of unequal length.
        """
        return Episodes(self, prompts, columns, seeds, poll)


def _are_schemas(tools: Any) -> bool:
    if not isinstance(tools, list | tuple):
        return False
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else None for tool in tools]
    return all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in functions)
