"""The survivors of a killed rank wait, and nobody says which rank it was."""

from __future__ import annotations

from hpcli.faults.entry import ByRank, Entry

ENTRY = Entry(
    id="llm-foundry-1133",
    title="a killed rank: the survivor's error does not name it",
    kind="launcher",
    source="llm-foundry#1133",
    condition="2 processes, one is killed by SIGKILL while the other waits for it in an all-reduce; then the "
    "same in step 2 of hpcli train",
    shown_by="formula",
    wrong=ByRank(("an error that names no rank", "")),
    right=ByRank(("error: rank 1 was killed by signal 9 (SIGKILL) in step 2", "")),
    how_we_know="the signal is sent by the process itself; what the survivor is told is searched for the "
    "number of the rank",
    why="A rank that the kernel kills, for memory most often, says nothing. Its peers get an error of their "
    "connection, or none and wait for the timeout, and their messages point at themselves. Who watches the "
    "processes knows, and ends the others within seconds.",
    seconds=8.0,
)


def right() -> str:
    from hpcli.faults.own_runs import error_of_training

    message = error_of_training("kill:rank=1,step=2")
    return message.partition(" (data)")[0]


def wrong() -> str:
    from hpcli.faults.own_runs import survivors_error

    error = survivors_error()
    if not error:
        return ""
    return "an error that names the rank" if "rank 1" in error else "an error that names no rank"
