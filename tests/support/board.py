"""What is in the event files of a directory, as TensorBoard reads them."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(directory: Path) -> EventAccumulator:
    """Everything, and of every tag all steps."""
    sizes = {"scalars": 0, "tensors": 0, "histograms": 0}
    accumulator = EventAccumulator(str(directory), size_guidance=sizes, purge_orphaned_data=False)
    accumulator.Reload()
    return accumulator


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of every event."""
    accumulator = events(directory)
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
