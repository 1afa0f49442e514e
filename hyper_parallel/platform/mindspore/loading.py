"""Whether MindSpore can be used here, and with what it can be."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

INSTALL = "pip install 'hyper-parallel[mindspore]'"


class MindSporeMissingError(ImportError):
    """MindSpore, or something that it needs, is not there. The message says what to do."""


def load_mindspore() -> ModuleType:
    """Import MindSpore and return it.

    Raises:
        MindSporeMissingError: it is not installed, or beside NumPy 2, with which MindSpore 2.10 dies in its first bfloat16
            operation ("numpy.core.multiarray failed to import").
    """
    if find_spec("mindspore") is None:
        raise MindSporeMissingError(f"MindSpore is not installed; {INSTALL} (Python 3.9 to 3.12)")
    import numpy

    if int(numpy.__version__.partition(".")[0]) >= 2:
        raise MindSporeMissingError(
            f"NumPy {numpy.__version__} is installed, and MindSpore 2.10 works with NumPy 1 only; {INSTALL}, or pip install 'numpy<2'"
        )
    import mindspore

    return mindspore
