"""``hpcli plan``: from options to a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcli.config.errors import ConfigError
from hpcli.config.load import load_config
from hpcli.config.overrides import Override
from hpcli.config.validate import ResolvedConfig, resolve_config
from hpcli.plan.activations import FakeRuns
from hpcli.plan.content import content, timeline_of
from hpcli.plan.estimate import Limits, Plan, make_plan
from hpcli.plan.remedies import Change, remedies
from hpcli.plan.text import text_lines
from hpcli.report.json_lines import encode
from hpcli.train.run import check_contents


def plan(
    config_file: Path,
    resolved: ResolvedConfig,
    overrides: Sequence[Override],
    *,
    limits: Limits,
    rank: int | None = None,
    json: bool = False,
    output: Path | None = None,
) -> list[str]:
    """The lines to print; with ``output``, the report is written there too.

    Raises:
        ConfigError: what train would find in the data and the model's parameters.
        ReportError: the report cannot be written.
    """
    check_contents(resolved)
    runs = FakeRuns()
    made = make_plan(resolved.config, resolved.mesh, limits, runs)

    def attempt(change: Change) -> Plan | None:
        """The same run with some keys changed, through the same validator."""
        given = dict(change)
        ranks = given.setdefault("launch.ranks", resolved.world_size)
        assert isinstance(ranks, int)
        more = [Override(f"{key}={_written(value)}") for key, value in given.items()]
        try:
            other = resolve_config(load_config(config_file, [*overrides, *more]), ranks=ranks)
        except ConfigError:
            return None
        return make_plan(other.config, other.mesh, limits, runs)

    told = content(made, resolved, config_file, rank, remedies(made, attempt), runs)
    timeline = timeline_of(made)
    if output is not None:
        from hpcli.plan.document import write

        write(output, told, timeline)
    return [encode(told)] if json else list(text_lines(told, timeline))


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
