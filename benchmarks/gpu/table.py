"""The stages and what they found, for the README."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.stages import STAGES


def rendered(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for every stage, "not run" where there is no result of full size, and on what they ran."""
    full = {name: record for name, record in found.items() if not record["reduced"]}
    lines = ["| stage | limit, s | passes if | outcome | took, s | figures |", "| --- | --- | --- | --- | --- | --- |"]
    for stage in STAGES:
        known, cells = f"{stage.name} | {stage.seconds} | {stage.passes}", "not run | - | -"
        if record := full.get(stage.name):
            text = (record.get("main") or record.get("reason") or "-").replace("|", "\\|").strip().splitlines()[0]
            cells = f"{record['outcome']} | {record['seconds']:.0f} | {text}"
        lines.append(f"| {known} | {cells} |")
    machines = {told(record["machine"]) for record in full.values() if "machine" in record}
    return "\n".join([*lines, *("\n" + machine for machine in sorted(machines))])


def told(machine: Mapping[str, Any]) -> str:
    """A machine with its versions, in a sentence."""
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "lightning"))
    return f"{machine['device']}, python {machine['python']}, {versions}."
