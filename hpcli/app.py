"""The commands of hpcli. Each turns its options into one call; what it does lives behind that call.

Nothing heavy is imported before a command runs, so that help and completion answer at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpcli import __version__
from hpcli.options import (
    DEVICES,
    ConfigArgument,
    Debug,
    Device,
    Fp32Reduce,
    Json,
    Offload,
    Output,
    Ranks,
    Set,
    Steps,
    byte_count,
    complete_config,
    complete_entry,
)
from hpcli.request import overrides_of, resolve

MOST_CHECKED_RANKS = 64

app = typer.Typer(
    name="hpcli",
    rich_markup_mode=None,  # plain help: rich cuts long option names off on a terminal of 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpcli {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Exit codes: 0 all is well, 1 a run or a check failed, 2 the request or the YAML file is wrong, "
    "130 interrupted.",
)
def hpcli(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train in parallel, and see the gradient norm that every rank holds.

    \b
    Example:
      hpcli train examples/configs/fsdp8.yaml
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def train(
    config: ConfigArgument,
    ranks: Ranks = None,
    steps: Steps = None,
    enable_offload: Offload = None,
    accumulate_allreduce_grads_in_fp32: Fp32Reduce = None,
    device: Device = None,
    set_: Set = None,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the model that a YAML file describes.

    Starts the ranks on this machine, or joins those that torchrun, srun or msrun started. Shows loss and
    gradient norm while it runs, and every logging.norm_table_every steps a table of the norm on every rank.
    Keeps metrics.jsonl and a plot. Exits with 1 if a rank fails or if ranks hold different norms.

    \b
    Examples:
      hpcli train examples/configs/fsdp8.yaml
      hpcli train examples/configs/fsdp8.yaml --ranks 4 --steps 20
      hpcli train examples/configs/hsdp2x4.yaml --enable-offload
      hpcli train examples/configs/fsdp8.yaml --set optimizer.lr=1e-3
      hpcli train examples/configs/fsdp8.yaml --json | jq .grad_norm
      torchrun --nproc-per-node 4 -m hpcli train examples/configs/fsdp4.yaml
    """
    overrides = overrides_of(set_, steps, enable_offload, accumulate_allreduce_grads_in_fp32, device)
    resolved, is_first = resolve(config, ranks, overrides)
    from hpcli.config.errors import ConfigError
    from hpcli.report.folder import remove_if_unused, run_folder
    from hpcli.train.run import train as run

    folder = run_folder(config, output, create=is_first)
    try:
        code = run(resolved, config_file=config, output=folder, json=as_json, debug=debug)
    except ConfigError as error:
        if not is_first:
            raise typer.Exit(2) from error
        remove_if_unused(folder, output)
        raise
    raise typer.Exit(code)


@app.command()
def validate(
    config: ConfigArgument,
    ranks: Ranks = None,
    steps: Steps = None,
    enable_offload: Offload = None,
    accumulate_allreduce_grads_in_fp32: Fp32Reduce = None,
    device: Device = None,
    set_: Set = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a YAML file without starting anything.

    Applies the checks that train applies and shows the layout that would run: ranks, mesh, batch, dtypes.
    Exits with 2 if anything is wrong, each problem with its file, line, key and what would be right.

    \b
    Examples:
      hpcli validate examples/configs/fsdp8.yaml
      hpcli validate examples/configs/fsdp8.yaml --ranks 16 --json
    """
    from hpcli.config.errors import ConfigError
    from hpcli.report.json_lines import encode
    from hpcli.report.layout import layout_json, layout_lines

    overrides = overrides_of(set_, steps, enable_offload, accumulate_allreduce_grads_in_fp32, device)
    try:
        resolved, is_first = resolve(config, ranks, overrides)
    except ConfigError as error:
        if as_json:
            problems = [vars(problem) for problem in error.problems]
            typer.echo(encode({"valid": False, "config_file": str(config), "problems": problems}))
        raise
    if is_first:
        lines = [encode(layout_json(config, resolved))] if as_json else layout_lines(config, resolved)
        for line in lines:
            typer.echo(line)


@app.command()
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


@app.command("check-norm")
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


@app.command()
def repro(
    ids: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[ID]...", help="As --list shows them, or a file of your own.", autocompletion=complete_entry),
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


@app.command()
def schema(debug: Debug = False) -> None:
    """Write the JSON schema of the YAML file to standard output.

    Editors that know it complete keys and mark mistakes. For those that use the YAML language server, begin
    the YAML file with the line

    \b
      # yaml-language-server: $schema=hpcli.schema.json

    \b
    Example:
      hpcli schema > hpcli.schema.json
    """
    from hpcli.config.export import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Show what this machine can run, and what is missing.

    Versions, devices, distributed backends, CPU cores, memory and the launcher; for everything that is
    missing or broken, how to get it. Exits with 1 if no framework can be imported.

    \b
    Example:
      hpcli doctor
      hpcli doctor --json
    """
    from hpcli.doctor import examine, report_lines

    findings = examine()
    for line in [json.dumps(findings)] if as_json else report_lines(findings):
        typer.echo(line)
    raise typer.Exit(0 if findings["usable"] else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hpcli and return its exit code. Whatever goes wrong ends as one message on standard error."""
    from hpcli.report.failures import (
        EndedBySignal,
        explain,
        interrupted,
        replace_closed_streams,
        silence,
        tolerate_any_text,
    )

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    replace_closed_streams()
    tolerate_any_text(sys.stdout, sys.stderr)
    try:
        code = typer.main.get_command(app)(args=arguments, prog_name="hpcli", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
        return 1
    except (KeyboardInterrupt, EndedBySignal, typer.Abort) as cause:
        return interrupted(cause)
    except Exception as error:  # noqa: BLE001  (the last resort: said as an internal error)
        return explain(error, debug="--debug" in arguments)
    return interrupted() if code == 130 else int(code or 0)
