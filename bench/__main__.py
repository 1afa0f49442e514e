"""``python -m bench``: run the measurements, print the table, say which targets were missed."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict

from bench import norm, plan, start, steps
from bench.results import Result, progress, table

PARTS: dict[str, Callable[[], list[Result]]] = {
    "start": start.measure,
    "steps": steps.measure,
    "norm": norm.measure,
    "plan": plan.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure speed against what is promised.")
    parser.add_argument("part", nargs="?", choices=list(PARTS), help="only this one")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.perf_counter()
    results: list[Result] = []
    for name in [arguments.part] if arguments.part else PARTS:
        results += PARTS[name]()
    progress(f"measured in {time.perf_counter() - began:.0f} s")
    if arguments.json:
        rows = [asdict(result) | {"met": result.met} for result in results]
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], "results": rows}, indent=2))
        return
    print(table(results))
    targets = [result for result in results if result.met is not None]
    missed = [f"{result.part}: {result.name}" for result in targets if not result.met]
    print(f"\n{len(targets) - len(missed)} of {len(targets)} targets met, on {os.cpu_count()} cores.")
    for line in missed:
        print(f"missed: {line}")
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1) and missed:
        print(f"The machine is busy (load {os.getloadavg()[0]:.0f}): wall times tell little.")


if __name__ == "__main__":
    main()
