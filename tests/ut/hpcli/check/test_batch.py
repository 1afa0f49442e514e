"""The batch of check-norm: unequal everywhere, and nowhere the same."""

from __future__ import annotations

import numpy as np
import pytest

from hpcli.check.batch import check_batches
from hpcli.check.layouts import matrix
from hpcli.data.text import IGNORED


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 16, 64])
def test_every_rank_has_data_of_its_own_and_another_number_of_tokens(ranks):
    config = next(layout for layout in matrix(ranks) if layout.name == f"fsdp{ranks}").resolved.config
    batches = check_batches(config)
    whole = batches.share(1, 0, 1)
    assert len({row.tobytes() for row in whole.inputs}) == len(whole.inputs)
    valid = [int((batches.share(1, rank, ranks).labels != IGNORED).sum()) for rank in range(ranks)]
    assert sum(valid) == batches.valid_tokens(1)
    assert ranks == 1 or len(set(valid)) > 1
    assert len(set((np.array(whole.labels) != IGNORED).sum(axis=1))) > 1
