"""What a run tells its user: progress, tables, plots and machine-readable records."""

from hpcli.report.errors import ReportError
from hpcli.report.sink import Sink, make_sink
from hpcli.report.verdict import norm_verdict

__all__ = ["ReportError", "Sink", "make_sink", "norm_verdict"]
