"""The options that commands share: what each is called, takes and says in the help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import typer

DEVICES = ("auto", "cpu", "cuda", "npu", "sim-npu")


def complete_config(incomplete: str) -> Iterator[str]:
    """Folders and YAML files that begin with what has been typed."""
    typed = Path(incomplete)
    folder, start = (typed, "") if incomplete.endswith("/") or not incomplete else (typed.parent, typed.name)
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
            if entry.is_dir():
                yield f"{entry}/"
            elif entry.suffix in (".yaml", ".yml"):
                yield str(entry)


def complete_entry(incomplete: str) -> list[str]:
    from hpcli.faults.registry import entries

    return [name for name in entries() if name.startswith(incomplete)]


def complete_device(incomplete: str) -> list[str]:
    return [device for device in DEVICES if device.startswith(incomplete)]


def byte_count(text: str) -> int:
    """``64GiB``, ``80e9`` or ``80 GB`` in bytes; units are of 1,024 (KiB) or 1,000 (KB).

    Raises:
        BadParameter: (typer's) anything else, and less than one byte.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgtp])(i)?)?b?\s*", text.lower())
    try:
        number = float(found.group(1)) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or number < 1:
        raise typer.BadParameter(f"{text!r} is no amount of memory; write 64GiB, 80GB or a number of bytes")
    _, unit, binary = found.groups()
    return int(number * (1024 if binary else 1000) ** (" kmgtp".index(unit) if unit else 0))


# typer reads these at run time, on Python 3.10 too: Optional, not `X | None`, in the aliases.
ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The YAML file.", autocompletion=complete_config)
]
Ranks = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        metavar="N",
        help="How many ranks. Without it: what a launcher started, else the product of the parallel degrees.",
    ),
]
Steps = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(metavar="N", help="Optimizer steps, instead of training.steps."),
]
Offload = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option(
        "--enable-offload/--no-enable-offload",
        help="Keep parameters, gradients and optimizer state on the CPU, instead of fsdp_config.enable_offload.",
    ),
]
Fp32Reduce = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option(
        "--accumulate-allreduce-grads-in-fp32/--no-accumulate-allreduce-grads-in-fp32",
        help="Accumulate and reduce gradients in float32, or in compute_dtype; instead of the file's choice.",
    ),
]
Device = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="|".join(DEVICES), help="Instead of device.", autocompletion=complete_device),
]
Set = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", metavar="KEY=VALUE", help="Override any key of the file, dotted. Repeatable."),
]
Output = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="Folder for metrics and plots, instead of runs/CONFIG-DATE-TIME."),
]
Resume = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="Go on from a checkpoint, or from the newest one of the run in this folder."),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]
