"""Several sources of prompts in one run, in exact proportions: ``data=mixture 'data.sources={NAME: {task: …}, …}'``."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from grpo_lightning.data.datamodule import ENDLESS, Fits, PromptData, Row, Source, keep, origin, permutation, run_order

COLUMNS = ("data_source", "data_rewards", "data_verifier")
"""What every row of a mixture knows of its source: its name, the rewards that apply or None for all, its verifier."""


_VERIFIERS = ("exact", "numeric", "reasoning_gym", "demonstrated")
_OWN = ("weight", "rewards", "verifier")


class Mixture:
    """The rows of several sources one after the other, with the columns of all; one that a row lacks is None.

    Args:
        sources: By name.
        weights: Prompts of each in a block of the run; a block has as many prompts as their sum.
        orders: That of each, see `run_order`.
        marks: `COLUMNS` of each.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, int],
        orders: Mapping[str, str],
        marks: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._sources, self._weights, self._orders, self._marks = sources, weights, orders, marks
        starts = itertools.accumulate(map(len, sources.values()), initial=0)
        self._starts = dict(zip(sources, starts, strict=False))  # the last is where one more would start
        self._columns = dict.fromkeys(column for source in sources.values() for column in source[0][1])

    def __len__(self) -> int:
        return min(sum(map(len, self._sources.values())), ENDLESS)

    def __getitem__(self, index: int) -> Row:
        name, number = self._find(index)
        prompt, columns = self._sources[name][number]
        return prompt, {**self._columns, **columns, **self._marks[name]}

    def origin(self, index: int) -> str:
        """Where the source has the row from."""
        name, number = self._find(index)
        return f"{name}: {origin(self._sources[name], number)}"

    def parts(self) -> list[tuple[int, Source]]:
        """The sources and the index of the first row of each."""
        return [(self._starts[name], source) for name, source in self._sources.items()]

    def keep(self, fits: Fits) -> "tuple[Mixture, int]":
        """The same sources without the rows that do not fit, and how many were lost."""
        kept = {name: keep(source, fits) for name, source in self._sources.items()}
        for name, (source, _) in kept.items():
            if not len(source):
                raise ValueError(f"data.sources.{name}: all prompts have more than data.max_prompt_length tokens")
        sources = {name: source for name, (source, _) in kept.items()}
        return Mixture(sources, self._weights, self._orders, self._marks), sum(lost for _, lost in kept.values())

    def run_order(self, order: str, seed: int) -> Callable[[int], int]:
        """Block after block, each with ``weights`` prompts of each source in the order of that source."""
        block = [name for name, weight in self._weights.items() for _ in range(weight)]
        orders = {name: run_order(source, self._orders[name], seed) for name, source in self._sources.items()}

        def index(i: int) -> int:
            number, position = divmod(i, len(block))
            places = range(len(block)) if order == "sequential" else permutation(seed, number, len(block)).tolist()
            name, *before = (block[place] for place in reversed(places[: position + 1]))
            return self._starts[name] + orders[name](number * self._weights[name] + before.count(name))

        return index

    def _find(self, index: int) -> tuple[str, int]:
        if not 0 <= index < sum(map(len, self._sources.values())):
            raise IndexError(index)
        name = next(name for name in reversed(self._starts) if self._starts[name] <= index)
        return name, index - self._starts[name]


def mixture(
    *, sources: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, Callable[..., PromptData]], **settings: Any
) -> PromptData:
    """Data module of a `Mixture`.

    Args:
        sources: Name -> ``weight``, ``rewards`` (those that score its rows; the others are None there), ``verifier``
            (a function of `grpo_lightning.reward.accuracy`), and the settings of its kind.
        kinds: A key that tells the kind of a source -> makes its data module.
        settings: Of `PromptData`, for all of them.

    Raises:
        ValueError: A source has no kind, or a setting that its kind does not know.
    """
    if len(sources) < 2:
        raise ValueError(f"data.sources={dict(sources)}: name two or more, such as {{words: {{task: spell_backward}}}}")
    weights = {name: source.get("weight", 1) for name, source in sources.items()}
    modules, marks = {}, {}
    for name, source in sources.items():
        key, weight = f"data.sources.{name}", weights[name]
        if not isinstance(weight, int) or weight < 1:
            raise ValueError(f"{key}.weight={weight}: expected a whole number of prompts in every block, from 1 on")
        found = [kind for kind in kinds if kind in source]
        if len(found) != 1:
            raise ValueError(f"{key}: expected one of {', '.join(kinds)}, got {', '.join(source) or 'nothing'}")
        options = {{"hub": "path"}.get(option, option): value for option, value in source.items() if option not in _OWN}
        make: Any = kinds[found[0]]
        if unknown := sorted(set(options) - (set(make.keywords) - set(settings)) - {"order"}):
            raise ValueError(f"{key}.{unknown[0]}: no setting of {make.func.__name__}")
        size = max(1, settings["validation_size"] * weight // sum(weights.values()))
        fixed = settings | {"order": options.get("order", settings["order"]), "validation_size": size}
        modules[name] = make(**{**options, **fixed, "prompts_per_step": 1})
        verifier = source.get("verifier") or make.keywords["verifier"].rpartition(".")[2]
        if verifier not in _VERIFIERS:
            raise ValueError(f"{key}.verifier={verifier}: expected one of {', '.join(_VERIFIERS)}")
        marks[name] = dict(zip(COLUMNS, (name, source.get("rewards"), verifier), strict=True))

    def mixed(part: Callable[[PromptData], Source]) -> Mixture:
        orders = {name: module.order for name, module in modules.items()}
        return Mixture({name: part(module) for name, module in modules.items()}, weights, orders, marks)

    return PromptData(
        train=lambda: mixed(lambda module: module.train),
        validation=lambda: mixed(lambda module: module.validation),
        **settings,
    )
