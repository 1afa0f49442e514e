"""The commands of hpcli. Each turns its options into one call; what it does lives behind that call.

Nothing heavy is imported before a command runs, so that help and completion answer at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from hpcli import __version__, commands
from hpcli.options import (
    ConfigArgument,
    Debug,
    Device,
    Fp32Reduce,
    Json,
    Offload,
    Output,
    Ranks,
    Resume,
    Set,
    Steps,
)
from hpcli.request import overrides_of, resolve

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
    resume: Resume = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the model that a YAML file describes.

    Starts the ranks on this machine, or joins those that torchrun, srun or msrun started. Shows loss and
    gradient norm while it runs, and every logging.norm_table_every steps a table of the norm on every rank.
    Keeps metrics.jsonl and a plot, and with checkpoint.every checkpoints, from which --resume goes on, on any
    number of ranks. Exits with 1 if a rank fails or if ranks hold different norms.

    \b
    Examples:
      hpcli train examples/configs/fsdp8.yaml
      hpcli train examples/configs/fsdp8.yaml --ranks 4 --steps 20
      hpcli train examples/configs/hsdp2x4.yaml --enable-offload
      hpcli train examples/configs/fsdp8.yaml --set optimizer.lr=1e-3
      hpcli train examples/configs/fsdp8.yaml --json | jq .grad_norm
      hpcli train examples/configs/fsdp8.yaml --set checkpoint.every=50 --output runs/a
      hpcli train examples/configs/fsdp8.yaml --set checkpoint.every=50 --resume runs/a
      torchrun --nproc-per-node 4 -m hpcli train examples/configs/fsdp4.yaml
    """
    overrides = overrides_of(set_, steps, enable_offload, accumulate_allreduce_grads_in_fp32, device)
    resolved, is_first = resolve(config, ranks, overrides)
    from hpcli.config.errors import ConfigError
    from hpcli.report.folder import remove_if_unused, run_folder
    from hpcli.train.run import train as run

    resumed = None
    if resume is not None:
        from hpcli.checkpoint.resume import prepare_resume

        resumed = prepare_resume(resume, resolved)
        output = output or resumed.run_folder
    folder = run_folder(config, output, create=is_first)
    try:
        code = run(resolved, config_file=config, output=folder, resume=resumed, json=as_json, debug=debug)
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


for _name, _command in (
    ("plan", commands.plan),
    ("check-norm", commands.check_norm),
    ("repro", commands.repro),
    ("export", commands.export),
):
    app.command(_name)(_command)


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
