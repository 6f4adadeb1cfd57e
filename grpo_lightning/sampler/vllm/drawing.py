"""One round of requests to a vLLM engine in this process, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_lightning.sampler.engine import Completion, GenerationRequest
from grpo_lightning.sampler.filtered import options
from grpo_lightning.types import Sampling


@dataclass
class Row:
    """A completion that is being drawn."""

    number: int
    prompt: Sequence[int]
    seed: int
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_over: bool = False
    is_stopped: bool = False
    """Whether it ended with a stop string."""
    versions: frozenset[str] = frozenset()
    """Of the weights that it was drawn with, as the engine says at its end."""

    def completion(self, end_ids: Sequence[int]) -> Completion:
        """What it came to."""
        return Completion(self.ids, self.logprobs, finished=self.is_stopped or self.ids[-1] in end_ids)


def drawn(
    engine: Any, rows: Sequence[Row], request: GenerationRequest, *, version: str, alone: bool = True
) -> list[Completion]:
    """All rows to their ends.

    Args:
        engine: A ``vllm.LLMEngine`` without requests.
        rows: Numbered from 0.
        request: How they are drawn.
        version: Of the weights that it has.
        alone: Whether this process may leave between tokens; not where others draw the same.

    Raises:
        RuntimeError: The engine says that it has drawn with other weights.
    """
    has_stops = request.stops is not None
    for row in rows:
        prompt = {"prompt_token_ids": list(row.prompt)}
        engine.add_request(str(row.number), prompt, parameters(request, row, stepwise=has_stops))
    try:
        while engine.has_unfinished_requests():
            if request.poll and alone:
                request.poll()
            changed = [_taken(rows, output) for output in engine.step()]
            if has_stops and (ended := _cut(request, changed)):
                engine.abort_request([str(row.number) for row in ended])
            for row in changed:
                if request.on_finished and alone and row.is_over and row.completion(request.end_ids).finished:
                    request.on_finished(row.number, row.ids)
    except BaseException:
        engine.abort_request([str(row.number) for row in rows if not row.is_over])
        raise
    if others := frozenset().union(*(row.versions for row in rows)) - {version}:
        raise RuntimeError(f"sampler=vllm: drawn with weights of version {', '.join(sorted(others))}, not {version}")
    return [row.completion(request.end_ids) for row in rows]


def parameters(request: GenerationRequest, row: Row, *, stepwise: bool) -> Any:
    """VLLM's parameters of one completion: nothing but temperature and filters shapes the distribution.

    Args:
        request: How completions are drawn.
        row: This one.
        stepwise: Whether its tokens are wanted as they come.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: Sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        **options(sampling),
        seed=row.seed,
        max_tokens=row.max_tokens,
        stop_token_ids=list(request.end_ids),
        ignore_eos=True,  # the line above has all of them
        logprobs=0,  # of the token that was drawn
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stepwise else RequestOutputKind.FINAL_ONLY,
    )


def _taken(rows: Sequence[Row], output: Any) -> Row:
    """The row of an output, with what the output adds."""
    row, part = rows[int(output.request_id)], output.outputs[0]
    row.ids += part.token_ids
    row.logprobs += part.logprobs.logprobs if part.logprobs else ()
    row.is_over = output.finished
    row.versions |= {span.version for span in part.weight_versions or ()}
    return row


def _cut(request: GenerationRequest, rows: Sequence[Row]) -> list[Row]:
    """The rows that end with a stop string, cut behind the token that completes it; one token is new in each.

    Returns:
        Those of them that the engine would go on with.
    """
    stops = request.stops
    if stops is None:
        return []
    kept = stops([row.ids[-stops.tail :] for row in rows], [1] * len(rows))
    ended = [row for row, tokens in zip(rows, kept, strict=True) if tokens]
    running = [row for row in ended if not row.is_over]
    for row in ended:
        row.is_stopped = row.is_over = True
    return running
