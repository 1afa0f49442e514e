"""Two runs agree because both are dead."""

from __future__ import annotations

import math
import struct
from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="automodel-3701",
    title="a parity test passes because both runs are dead",
    kind="resume",
    source="Automodel#3701",
    condition="a model whose head is all zeros, on 1 and on 2 ranks: gradient norm 0, loss ln 32000, in both",
    shown_by="formula",
    wrong=True,
    right={"verdict": "does not hold", "cause": "dead-model"},
    how_we_know="equal logits give every token the loss ln 32000 = 10.373490, whatever is before them, and "
    "no gradient to it",
    why="The test asked whether two runs agree, and 0.0000 agrees with 0.0000. Nothing was trained in "
    "either. An oracle must refuse to say that all is well when it had nothing to see: a norm of 0, "
    "parameters without gradient, ranks with equal data.",
    ranks=(1,),
)
LOSS = math.log(32000)


def wrong() -> bool:
    """Whether the test passes."""
    one_rank, two_ranks = (0.0, LOSS), (0.0, LOSS)
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one_rank, two_ranks, strict=True))


def right() -> dict[str, str]:
    from hpcli.check.evidence import Degrees, Expected
    from hpcli.check.verdict import judge

    expected = Expected({"head.weight": 0.0}, LOSS, 1e-6, 1e-5, 1e-7, {})
    verdict = judge("fsdp2", [_account(rank) for rank in range(2)], expected, Degrees(1, 1, 2, 1, 1, False, "float32"), 0.0)
    return {
        "verdict": "holds" if verdict.holds else "does not hold",
        "cause": verdict.cause.id if verdict.cause else "none",
    }


def _account(rank: int) -> dict[str, Any]:
    """What a rank of the dead run tells check-norm."""
    sums = dict.fromkeys(("gg", "gr", "rr", "to_right", "to_last_micro_batch", "to_mean_of_means"), 0.0)
    return {
        "rank": rank,
        "coordinates": {"pp": 0, "dp_replicate": 0, "dp_shard": rank, "tp": 0},
        "collectives_add_up": True,
        "data": str(rank),
        "loss": LOSS / 2,
        "reshards": False,
        "parameters": [{"name": "head.weight", "class": "sharded", "missing": False, **sums}],
        "classes": {"sharded": 0.0},
        "norm": struct.pack("<d", 0.0).hex(),
        "held": 0.0,
        "contributed": 0.0,
        "clipped": {"head.weight": 0.0},
        "collectives": 1,
    }
