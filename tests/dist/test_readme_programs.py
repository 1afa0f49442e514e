"""The programs in the README run, and their norms are those of one process."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def programs(tmp_path):
    """The README's three programs, as files."""
    fences = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for name, text in zip(("model.py", "tensor_parallel.py", "pipeline.py"), fences, strict=True):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("program", ["tensor_parallel.py", "pipeline.py"])
def test_a_program_of_the_readme(on_ranks, programs, program):
    by_rank = on_ranks("readme_programs:printed", 4, folder=str(programs), name=program)
    norms = {re.search(r"norm (\S+)", lines[0])[1] for lines in by_rank}
    assert len(norms) == 1
    (norm,) = norms
    said = re.search(rf"`torchrun --nproc-per-node 4 {program}`\D*norm (\d+\.\d+)", README.read_text())[1]
    assert float(norm) == pytest.approx(float(said), rel=1e-4)  # bfloat16 kernels differ between processors

    here = runpy.run_path(str(programs / "model.py"))
    model = here["Model"]().double()
    here["loss_of"](model(here["TOKENS"][:, :-1]), here["TOKENS"][:, 1:]).backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert float(norm) == pytest.approx(exact, rel=1e-3)  # computed in bfloat16
