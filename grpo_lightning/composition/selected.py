"""A part of composed settings, as plain values."""

from typing import Any

from omegaconf import DictConfig, OmegaConf


def selected(cfg: DictConfig, key: str, *, throw_on_missing: bool = False) -> Any:
    """What stands at a dotted key, resolved; None where nothing does.

    Args:
        cfg: Settings as composed.
        key: Of a value, a list or a mapping.
        throw_on_missing: Whether ``???`` is an error.

    Raises:
        OmegaConfBaseException: It refers to what is not there.
    """
    found = OmegaConf.select(cfg, key)
    if not OmegaConf.is_config(found):
        return found
    return OmegaConf.to_container(found, resolve=True, throw_on_missing=throw_on_missing)
