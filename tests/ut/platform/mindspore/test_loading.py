"""What is said where MindSpore cannot be used. Each case is a process of its own, in which MindSpore is never imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mindspore" else find_spec(name, *rest)
"""
NUMPY_2 = """
import importlib.util, numpy
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: object() if name == "mindspore" else find_spec(name, *rest)
numpy.__version__ = "2.1.3"
"""
START = """
import hyper_parallel
try:
    hyper_parallel.init("mindspore", "cpu")
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    "there, message",
    [
        (WITHOUT, "MindSporeMissingError: MindSpore is not installed; pip install 'hyper-parallel[mindspore]' (Python 3.9 to 3.12)"),
        (
            NUMPY_2,
            (
                "MindSporeMissingError: NumPy 2.1.3 is installed, and MindSpore 2.10 works with NumPy 1 only; "
                "pip install 'hyper-parallel[mindspore]', or pip install 'numpy<2'"
            ),
        ),
    ],
    ids=["no MindSpore", "NumPy 2"],
)
def test_what_is_missing_is_said_in_one_line(there, message):
    run = subprocess.run([sys.executable, "-c", there + START], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == message
