"""Pipeline parallelism without a framework: schedules as data, what makes one valid, how long it takes, and how it is run."""

from hyper_parallel.core.pipeline_parallel.schedule import Kind, PipelineSchedule, Step, make_schedule
from hyper_parallel.core.pipeline_parallel.scheduler import PipelineScheduler, Stage, Transport
from hyper_parallel.core.pipeline_parallel.simulate import Durations, Timeline, draw, simulate
from hyper_parallel.core.pipeline_parallel.validate import ScheduleError, validate

__all__ = [
    "Durations",
    "Kind",
    "PipelineSchedule",
    "PipelineScheduler",
    "ScheduleError",
    "Stage",
    "Step",
    "Timeline",
    "Transport",
    "draw",
    "make_schedule",
    "simulate",
    "validate",
]
