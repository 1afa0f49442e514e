"""Real MindSpore ranks: forked from a server that has imported MindSpore and executed nothing.

After one executed operation MindSpore's threads are there, and a forked child would hang in its first one.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[2] / "rank_programs"
TIMEOUT_SECONDS = 120.0
PRELOADED = [
    "torch",
    "torch.distributed",
    "mindspore",
    "mindspore.mint",
    *(
        f"hyper_parallel.platform.mindspore.{name}"
        for name in ("clip_grad", "cross_entropy", "optimizer", "parallelize", "pipeline")
    ),
    "ms_norm_programs",
    "ms_parallel_programs",
    "ms_programs",
    "ms_single_programs",
]

OnRanks = Callable[..., list[Any]]

collect_ignore_glob = [] if find_spec("mindspore") else ["test_*.py"]


@pytest.fixture(scope="session")
def _forkserver() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))
        patch.setenv("PYTHONPATH", str(PROGRAMS))
        patch.setenv("GLOG_v", "3")  # MindSpore: errors only
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        yield context


@pytest.fixture
def on_ranks(_forkserver: Any) -> Iterator[OnRanks]:
    """``on_ranks("module:function", world_size, **arguments)``: what the function returns on each rank, in rank order."""
    from ms_programs import call

    folder = Path(tempfile.mkdtemp())  # MindSpore writes rank_0/ into the working directory when it fails

    def run(program: str, world_size: int, **arguments: Any) -> list[Any]:
        pipes = [_forkserver.Pipe(duplex=False) for _ in range(world_size)]
        meeting = tempfile.mktemp(dir=folder)
        ranks = [
            _forkserver.Process(target=call, args=(writer, program, rank, world_size, meeting, str(folder), arguments))
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            return [_result(rank, reader) for rank, (reader, _) in enumerate(pipes)]
        finally:
            for process in ranks:
                process.join(2)
                process.kill()
                process.join()

    yield run
    shutil.rmtree(folder, ignore_errors=True)


def _result(rank: int, reader: Any) -> Any:
    if not reader.poll(TIMEOUT_SECONDS):
        pytest.fail(f"rank {rank} did not answer within {TIMEOUT_SECONDS:g} s", pytrace=False)
    try:
        kind, value = reader.recv()
    except EOFError:
        pytest.fail(f"rank {rank} ended without an answer", pytrace=False)
    if kind == "error":
        pytest.fail(f"rank {rank}:\n{value}", pytrace=False)
    return value
