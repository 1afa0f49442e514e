"""Which dtype holds what, and the one place where ``reduce_dtype=None`` gets its meaning.

Dtypes are named by their framework-free names ("float32", "bfloat16", "float16"), so that both platforms share the
rules. Memory and arithmetic of a mixed-precision run follow three choices:

* ``params_dtype``: the storage of parameters;
* ``compute_dtype``: unsharded parameters and activations, and therefore the *native* dtype of every gradient;
* ``reduce_dtype``: accumulation over micro-batches and the reduction over ranks; ``None`` means the native dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: object) -> str:
    """Normalise a dtype of any framework, or its name, to the framework-free name.

    Raises:
        ValueError: not a floating-point dtype that is known here.
    """
    name = str(dtype).rsplit(".", 1)[-1].lower()
    if name not in ITEM_SIZES:
        raise ValueError(f"unknown dtype {dtype!s}; known: {', '.join(ITEM_SIZES)}")
    return name


def resolve_reduce_dtype(reduce_dtype: object | None, native_gradient_dtype: object) -> str:
    """The dtype in which a gradient is accumulated and reduced: ``None`` is the gradient's own dtype.

    Everything that allocates, lays out, reduces or checks a gradient buffer asks this function. Allocators read a
    missing dtype as float32, which is not what "no cast" means.
    """
    return dtype_name(native_gradient_dtype if reduce_dtype is None else reduce_dtype)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a run. Master weights and optimizer state are float32 whatever is chosen here.

    Args:
        params_dtype: storage of the parameters, "float32" or "bfloat16".
        compute_dtype: unsharded parameters and activations.
        reduce_dtype: accumulation and reduction of gradients; ``None`` resolves to ``compute_dtype``.

    Raises:
        ValueError: an unknown dtype, or float16 storage, in which small updates would be lost.
    """

    params_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str | None = "float32"

    def __post_init__(self) -> None:
        for field in ("params_dtype", "compute_dtype"):
            object.__setattr__(self, field, dtype_name(getattr(self, field)))
        if self.reduce_dtype is not None:
            object.__setattr__(self, "reduce_dtype", dtype_name(self.reduce_dtype))
        if self.params_dtype == "float16":
            raise ValueError("params_dtype float16 would lose small updates; store float32 or bfloat16")

    @property
    def resolved_reduce_dtype(self) -> str:
        """``reduce_dtype`` with ``None`` resolved to the native gradient dtype."""
        return resolve_reduce_dtype(self.reduce_dtype, self.compute_dtype)

    @property
    def storage_rounds_compute(self) -> bool:
        """True where the stored parameter is narrower than the one computed with.

        Otherwise the cast to ``compute_dtype`` in the all-gather already gives exactly the stored value, so the
        float32 master weights can serve as the storage and no second copy is kept.
        """
        return ITEM_SIZES[self.params_dtype] < ITEM_SIZES[self.compute_dtype]


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep parameter shards, their gradients and the optimizer state in host memory.

    Args:
        pin_memory: page-locked host memory for asynchronous copies; ``None`` pins where an accelerator is in use
            (pinning without one fails).
    """

    pin_memory: bool | None = None

    def pins_on(self, device_type: str) -> bool:
        """Whether shards are pinned when the compute device is ``device_type``."""
        return device_type != "cpu" and self.pin_memory is not False
