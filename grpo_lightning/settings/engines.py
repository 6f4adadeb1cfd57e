"""Settings that an engine beside the policy cannot follow."""

from collections.abc import Callable

from grpo_lightning.sampler.vllm import arguments
from grpo_lightning.settings.contradictions import Reader, Unsound

_VLLM = "grpo_lightning.sampler.vllm."


def engine_problems(get: Reader) -> list[str]:
    """What the settings ask of ``sampler=vllm`` or ``sampler=vllm_server`` that it cannot do."""
    target = str(get("sampler._target_"))
    if not target.startswith(_VLLM):
        return []
    name = "sampler=vllm_server" if target.endswith("VLLMServer") else "sampler=vllm"
    found: list[str] = []
    for rule in _RULES:
        try:
            found += rule(get, name)
        except Unsound:
            continue  # broken or absent, which is said elsewhere or is no problem here
    return found


def _installed(get: Reader, name: str) -> list[str]:
    needed = name == "sampler=vllm" and get("mode") in ("fit", "validate", "preflight")
    told = arguments.missing() if needed else None
    return [told] if told else []


def _arguments(get: Reader, name: str) -> list[str]:
    engine = get("sampler.engine") or {}
    if not isinstance(engine, dict):
        return [f"sampler.engine={engine}: allowed is a mapping, such as {{max_num_seqs: 256}}"]
    return arguments.problems(engine)


def _own_cache(get: Reader, name: str) -> list[str]:
    instead = "sampler.kv_cache_gib" if name == "sampler=vllm" else "the server's own settings"
    return [
        f"{part}.kv_cache_gib={get(f'{part}.kv_cache_gib')}: allowed with {name} is null; an engine has a cache of its "
        f"own, see {instead}"
        for part in ("rollout", "validation")
        if get(f"{part}.kv_cache_gib") is not None
    ]


def _no_entropy(get: Reader, name: str) -> list[str]:
    share = get("rollout.top_entropy")
    if share == 1:
        return []
    return [f"rollout.top_entropy={share}: allowed with {name} is 1: an engine does not tell the entropy of a token"]


def _whole_weights(get: Reader, name: str) -> list[str]:
    bits = get("policy.quantization")
    if bits is None:
        return []
    return [f"policy.quantization={bits}: allowed with {name} is null: its weights are handed over as they are"]


def _of_transformers(get: Reader, name: str) -> list[str]:
    if get("policy._target_") != "grpo_lightning.policy.plain.PlainPolicy":
        return []
    return [f"policy=plain: allowed with {name} are policies of transformers, whose models vLLM knows"]


_RULES: tuple[Callable[[Reader, str], list[str]], ...] = (
    _installed,
    _arguments,
    _own_cache,
    _no_entropy,
    _whole_weights,
    _of_transformers,
)
