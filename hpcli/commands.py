"""The commands around training: what a run needs, whether its norm is right, what goes wrong elsewhere, its weights as a file.

``hpcli/app.py`` adds them to the application.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpcli.options import (
    DEVICES,
    ConfigArgument,
    Debug,
    Device,
    Fp32Reduce,
    Json,
    Offload,
    Ranks,
    Set,
    byte_count,
    complete_config,
    complete_entry,
)
from hpcli.request import overrides_of, resolve

MOST_CHECKED_RANKS = 64


def plan(
    config: ConfigArgument,
    ranks: Ranks = None,
    rank: Annotated[Optional[int], typer.Option(metavar="R", help="Show this rank, not the fullest.")] = None,  # noqa: UP045
    device_memory: Annotated[
        int, typer.Option(metavar="SIZE", parser=byte_count, help="Memory of a device.", show_default=False)
    ] = "64GiB",  # type: ignore[assignment]
    host_memory: Annotated[
        int, typer.Option(metavar="SIZE", parser=byte_count, help="Memory of a host.", show_default=False)
    ] = "2TiB",  # type: ignore[assignment]
    ranks_per_host: Annotated[int, typer.Option(metavar="N", min=1, help="How many ranks share a host.")] = 8,
    enable_offload: Offload = None,
    accumulate_allreduce_grads_in_fp32: Fp32Reduce = None,
    device: Device = None,
    set_: Set = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the report there too: report.html or report.md."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what a YAML file needs on a cluster of any size, without one.

    Works out, for every class of ranks, the bytes of parameters, gradients, optimizer state, activations and
    buffers, and whether they fit; what would help most if not; the collectives of a step; the pipeline's
    schedule. Nothing is started or allocated, and what train would refuse is refused. The device's memory is
    64GiB and the host's 2TiB unless told otherwise. Exits with 0 whether it fits or not.

    \b
    Examples:
      hpcli plan examples/configs/fsdp8.yaml
      hpcli plan examples/configs/tower_1t_fsdp128_ep128.yaml --no-enable-offload
      hpcli plan examples/configs/tower_1t_fsdp128_ep128.yaml --device-memory 80GB --output report.html
      hpcli plan examples/configs/fsdp8.yaml --ranks 1024 --json
    """
    overrides = overrides_of(set_, None, enable_offload, accumulate_allreduce_grads_in_fp32, device)
    if output is not None and output.suffix not in (".html", ".md"):
        raise typer.BadParameter(f"{output}: the name must end in .html or .md", param_hint="--output")
    resolved, is_first = resolve(config, ranks, overrides, elsewhere=True)
    if not is_first:
        return
    if rank is not None and not 0 <= rank < resolved.world_size:
        raise typer.BadParameter(f"{rank}: the run has the ranks 0 to {resolved.world_size - 1}", param_hint="--rank")
    from hpcli.plan.command import plan as make
    from hpcli.plan.estimate import Limits

    limits = Limits(device_memory, host_memory, ranks_per_host)
    for line in make(config, resolved, overrides, limits=limits, rank=rank, json=as_json, output=output):
        typer.echo(line)


def check_norm(
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(
            metavar="[CONFIG]", help="Check the layout of this YAML file alone.", autocompletion=complete_config
        ),
    ] = None,
    ranks: Ranks = None,
    layout: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME", help="Check this layout of the matrix only. Repeatable."),
    ] = None,
    platform: Annotated[str, typer.Option(metavar="torch", help="The framework.")] = "torch",
    device: Device = None,
    set_: Set = None,
    inject: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FAULT", help="Plant a known fault into the ranks; the check must fail and name it."),
    ] = None,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="Show what can be planted.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove that every rank holds the norm that a single process computes, layout by layout.

    Without CONFIG, goes through every layout that suits the number of ranks. On each: the ranks' norms are equal
    bit for bit and equal to an independent single-process reference; each rank's shard of every gradient is the
    reference's slice; losses agree; offload changes no bit; exact values come through the real reducers.
    Exits with 1 if anything does not hold, and names the cause.

    \b
    Examples:
      hpcli check-norm --ranks 8
      hpcli check-norm --ranks 4 --layout tp2+sp-fsdp2 --layout ep4-fsdp4
      hpcli check-norm examples/configs/fsdp8.yaml
      hpcli check-norm --ranks 4 --inject loss-scale-left-in
    """
    from hpcli.check import command

    if list_faults:
        command.list_faults(json=as_json)
        return
    if platform != "torch":
        raise typer.BadParameter(f"{platform!r} is not available in this version, which checks torch", param_hint="--platform")
    if config is not None and layout:
        raise typer.BadParameter("CONFIG is a layout of its own; leave one of the two out", param_hint="--layout")
    if config is None and set_:
        raise typer.BadParameter("changes a CONFIG, and there is none", param_hint="--set")
    resolved = None
    if config is not None:
        resolved, _ = resolve(config, ranks, overrides_of(set_, None, None, None, device))
    count = resolved.world_size if resolved is not None else ranks
    if count is None:
        raise typer.BadParameter("how many ranks? Give --ranks N, or a CONFIG", param_hint="--ranks")
    if not 1 <= count <= MOST_CHECKED_RANKS:
        raise typer.BadParameter(f"{count}: from 1 to {MOST_CHECKED_RANKS}", param_hint="--ranks")
    if device is not None and device not in DEVICES:
        raise typer.BadParameter(f"{device!r}: one of {', '.join(DEVICES)}", param_hint="--device")
    where = resolved.config.device if resolved is not None else device or "cpu"
    from hpcli.config.validate import MISSING_DEVICE
    from hpcli.doctor import accelerator_count
    from hpcli.train.run import device_type

    if accelerator_count(where) == 0:
        raise typer.BadParameter(f"{where}: {MISSING_DEVICE}", param_hint="--device")

    code = command.check_norm(
        resolved, ranks=count, names=layout or [], device=device_type(where), inject=inject, json=as_json
    )
    raise typer.Exit(code)


def repro(
    ids: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="ID", help="As --list shows them, or a file of your own.", autocompletion=complete_entry),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Re-enact the whole catalogue.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show what can be re-enacted.")] = False,
    class_: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--class", metavar="CLASS", help="All entries of a class, such as offload."),
    ] = None,
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="Another number of ranks, where an entry can be shown on several."),
    ] = None,
    new: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="ID", help="Write the file of an entry of your own into this folder."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Re-enact a known fault on real ranks: the wrong value beside the right one, and why.

    The faulty rule is put back, or the faulty formula or the stock library is run, and then this library as it is.
    Exits with 0 if the fault appears as reported and the library is right, with 1 if either does not hold.

    \b
    Examples:
      hpcli repro --list
      hpcli repro issue-64
      hpcli repro --class offload
      hpcli repro --all --json
      hpcli repro --new my-fault && hpcli repro ./my_fault.py
    """
    from hpcli.repro import command

    if new is not None:
        command.new(new)
    elif list_:
        command.list_entries(class_, json=as_json)
    else:
        raise typer.Exit(
            command.repro(ids or [], every=every, kind=class_, ranks=ranks, json=as_json, debug=debug)
        )


def export(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or the folder of a run: its newest one.")],
    output: Annotated[Path, typer.Argument(metavar="FILE", help="Such as model.safetensors.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it exists.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the weights of a checkpoint into one safetensors file, which plain PyTorch loads.

    The tensors are float32 and named as in the model, whatever layout wrote the checkpoint:
    model.load_state_dict(safetensors.torch.load_file(FILE)).

    \b
    Examples:
      hpcli export runs/fsdp8-20261201-005446 model.safetensors
      hpcli export runs/a/checkpoints/step-00000050 model.safetensors
    """
    from hpcli.checkpoint.export import export_weights
    from hpcli.report.formats import count_text
    from hpcli.report.json_lines import encode

    if output.exists() and not force:
        raise typer.BadParameter(f"{output} exists; --force replaces it", param_hint="FILE")
    shapes = export_weights(source, output)
    elements = sum(prod(shape) for shape in shapes.values())
    told = {"event": "export", "file": str(output), "tensors": len(shapes), "elements": elements}
    line = f"{output}: {count_text(len(shapes), 'tensor')}, {count_text(elements, 'element')} in float32"
    typer.echo(encode(told) if as_json else line)
