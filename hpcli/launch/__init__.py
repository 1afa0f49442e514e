"""Start local ranks or join those of a launcher, watch them, and end them. Imports no framework."""

from hpcli.launch.context import PHASES, RankContext
from hpcli.launch.environment import Joined, detect_launcher
from hpcli.launch.errors import LaunchError, RankFailure
from hpcli.launch.joined import run_joined
from hpcli.launch.local import RankServer

__all__ = [
    "PHASES",
    "Joined",
    "LaunchError",
    "RankContext",
    "RankFailure",
    "RankServer",
    "detect_launcher",
    "run_joined",
]
