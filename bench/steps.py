"""Seconds a step of the tiny decoder on 8 CPU ranks: hpcli's step beside two loops written with FSDP2 by hand.

The loops take turns inside the same processes, so that a busy spell meets all of them; medians.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from bench.results import Result, progress, seconds
from hpcli.launch import RankServer

RANKS, ROUNDS, STEPS_A_TURN = 8, 10, 4
NOISE = 1.1


def measure() -> list[Result]:
    took: dict[str, list[float]] = defaultdict(list)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            progress(f"steps: {event['text']}")
        else:
            for name, times in event["seconds"].items():
                took[name] += times

    with RankServer() as server:
        payload = {"rounds": ROUNDS, "steps": STEPS_A_TURN}
        server.run("bench.steps_ranks:run", payload, RANKS, timeout_seconds=300, on_event=on_event)
    first, hand, ours = (statistics.median(took[name]) for name in ("first", "hand", "ours"))
    return [
        Result("steps", "against the loop written first", seconds(ours), f"loop {seconds(first)}", first / ours, "x", 3.0),
        Result("steps", "against the best one by hand", seconds(ours), f"loop {seconds(hand)}", ours / hand, "x", NOISE, False),
    ]
