"""Mesh axes and their sizes: which rank sits where, which ranks form a group, and what must divide what.

An *axis* is always a mesh axis; a *dimension* is always a tensor dimension. Ranks are numbered row-major over
``AXES``, so that ``tp`` neighbours (which talk most) are adjacent and pipeline stages (which talk least) are farthest
apart. Expert parallelism multiplies no ranks: it carves ``dp_shard`` into ``dp_shard // ep`` times ``ep``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from hyper_parallel.core.sharding import chunk_size, piece

AXES = ("pp", "dp_replicate", "dp_shard", "tp")

CONFIG_KEYS = {
    "pp": "pipeline_parallel",
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "ep": "expert_parallel",
    "tp": "tensor_parallel",
}

FILL = -1
"""As ``dp_shard``: take whatever number of ranks the other axes leave over."""


class LayoutProblem(NamedTuple):
    """One reason why a layout is impossible: the configuration key, its value, and what would work."""

    key: str
    value: object
    message: str


class LayoutError(ValueError):
    """A layout that cannot exist. ``problems`` holds every reason found."""

    def __init__(self, problems: list[LayoutProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.key}: {p.message}" for p in problems))


@dataclass(frozen=True)
class ParallelMesh:
    """The degrees of parallelism of one run. Their product is the number of ranks; only ``ep`` multiplies none, since it is taken
    out of ``dp_shard``.

    Raises:
        LayoutError: (a ValueError) a degree that is no whole number of at least 1, or ``ep`` that does not divide ``dp_shard``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                problem = LayoutProblem(CONFIG_KEYS[axis], size, f"must be a whole number of at least 1, not {size!r}")
                raise LayoutError([problem])
        if self.dp_shard % self.ep:
            raise LayoutError([_expert_problem(self.ep, self.dp_shard)])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each axis, in the order of ``AXES``."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """How many ranks the mesh spans."""
        return prod(self.sizes)

    @property
    def data_parallel_size(self) -> int:
        """How many ranks see different data: ``dp_replicate * dp_shard``."""
        return self.dp_replicate * self.dp_shard

    @property
    def active_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank, in the order of ``AXES``; ``("dp_shard",)`` on a single rank."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1) or ("dp_shard",)

    @property
    def degrees(self) -> dict[str, int]:
        """The active axes and their sizes, and ``ep`` where experts are spread: what the mesh is called in words."""
        return {axis: getattr(self, axis) for axis in self.active_axes} | ({"ep": self.ep} if self.ep > 1 else {})

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` on every axis.

        Raises:
            IndexError: ``rank`` is not in ``range(world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not on a mesh of {self.world_size} ranks")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at the given coordinates; an axis that is left out counts as 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinates.get(axis, 0)
        return rank

    def data_parallel_rank(self, rank: int) -> int:
        """Which share of the global batch ``rank`` works on, in ``range(data_parallel_size)``."""
        position = self.coordinates(rank)
        return position["dp_replicate"] * self.dp_shard + position["dp_shard"]

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Partition the ranks into groups that differ only on ``axes``, each in ascending order of rank."""
        return list(self._groups(axes))

    def _groups(self, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        fixed = [axis for axis in AXES if axis not in axes]
        moving = [axis for axis in AXES if axis in axes]
        for outer in product(*(range(getattr(self, axis)) for axis in fixed)):
            base = dict(zip(fixed, outer, strict=True))
            yield tuple(
                self.rank_at(**base, **dict(zip(moving, inner, strict=True)))
                for inner in product(*(range(getattr(self, axis)) for axis in moving))
            )


def resolve_mesh(
    world_size: int, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, ep: int = 1, tp: int = 1
) -> ParallelMesh:
    """Check the degrees against the number of ranks and fill a ``dp_shard`` of -1.

    Raises:
        LayoutError: a degree below 1, a product that is not ``world_size``, or ``ep`` that does not divide ``dp_shard``.
    """
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    problems = [
        LayoutProblem(CONFIG_KEYS[axis], size, f"must be at least 1{' (or -1 to fill)' * (axis == 'dp_shard')}, not {size}")
        for axis, size in (*degrees.items(), ("ep", ep))
        if size < 1 and not (axis == "dp_shard" and size == FILL)
    ]
    if problems:
        raise LayoutError(problems)
    others = pp * dp_replicate * tp
    if dp_shard == FILL:
        if world_size % others:
            raise LayoutError([_fill_problem(world_size, degrees)])
        dp_shard = world_size // others
    elif others * dp_shard != world_size:
        raise LayoutError([_product_problem(world_size, degrees)])
    return ParallelMesh(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep, tp=tp)


def _written(degrees: dict[str, int]) -> str:
    named = [f"{CONFIG_KEYS[axis]} {size}" for axis, size in degrees.items() if size > 1]
    return " x ".join(named) or "every degree 1"


def _fill_problem(world_size: int, degrees: dict[str, int]) -> LayoutProblem:
    others = {axis: size for axis, size in degrees.items() if axis != "dp_shard"}
    product_of_others = prod(others.values())
    lower = world_size // product_of_others * product_of_others
    counts = " or ".join(str(n) for n in (lower, lower + product_of_others) if n)
    return LayoutProblem(
        CONFIG_KEYS["dp_shard"],
        FILL,
        f"cannot fill {world_size} ranks: {_written(others)} takes ranks in multiples of {product_of_others}; "
        f"use {counts} ranks, or other degrees",
    )


def _product_problem(world_size: int, degrees: dict[str, int]) -> LayoutProblem:
    total = prod(degrees.values())
    others = total // degrees["dp_shard"]
    key = CONFIG_KEYS["dp_shard"]
    if world_size % others == 0:
        cure = f"{key}: {world_size // others} (or -1) would use all {world_size}"
    else:
        cure = f"the other degrees ({_written({**degrees, 'dp_shard': 1})}) must divide {world_size}"
    return LayoutProblem(
        key,
        degrees["dp_shard"],
        f"{_written(degrees)} makes {total} rank{'s' * (total != 1)}, but the run has {world_size}; "
        f"{cure}; or start it with {total} rank{'s' * (total != 1)}",
    )


def _expert_problem(ep: int, dp_shard: int) -> LayoutProblem:
    allowed = ", ".join(str(n) for n in divisors(dp_shard))
    return LayoutProblem(
        CONFIG_KEYS["ep"],
        ep,
        f"expert_parallel {ep} must divide data_parallel_shard {dp_shard}, out of which it is carved; "
        f"values that would work: {allowed}",
    )


def divisors(number: int) -> list[int]:
    """All positive divisors of a positive ``number``, ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def check_divisible(key: str, value: int, divisor_key: str, divisor: int) -> LayoutProblem | None:
    """The one divisibility rule: ``value`` must be a multiple of ``divisor``; the message offers the nearest ones."""
    if value % divisor == 0:
        return None
    lower = value // divisor * divisor
    nearest = " or ".join(str(n) for n in (lower, lower + divisor) if n)
    return LayoutProblem(
        key, value, f"{value} is not divisible by {divisor_key} {divisor}; {nearest} would work, or change {divisor_key}"
    )


def check_batch(mesh: ParallelMesh, global_batch_size: int, micro_batch_size: int | None) -> list[LayoutProblem]:
    """The global batch must split evenly over the data-parallel ranks and then into micro-batches.

    ``micro_batch_size`` is per data-parallel rank; ``None`` means one micro-batch of the rank's whole share.
    """
    key = "training.global_batch_size"
    dp = mesh.data_parallel_size
    uneven = check_divisible(key, global_batch_size, "the number of data-parallel ranks", dp)
    if uneven or micro_batch_size is None:
        return [uneven] if uneven else []
    share = global_batch_size // dp
    if share % micro_batch_size == 0:
        return []
    allowed = ", ".join(str(n) for n in divisors(share))
    return [
        LayoutProblem(
            "training.micro_batch_size",
            micro_batch_size,
            f"{micro_batch_size} does not divide the {share} sequences of each data-parallel rank "
            f"(global_batch_size {global_batch_size} over {dp}); values that would work: {allowed}",
        )
    ]


def check_transformer(
    mesh: ParallelMesh,
    *,
    num_layers: int,
    cut: Mapping[str, int],
    sequence: int,
    image_positions: int = 0,
    vocabulary: int | None = None,
    sequence_parallel: bool = False,
    interleave: int = 1,
) -> list[LayoutProblem]:
    """What tensor, sequence and pipeline parallelism demand of a transformer's sizes.

    Torch turns some of these into a view error, others into an abort inside gloo, so they are refused before any
    process starts.

    Args:
        cut: configuration key -> size of everything that tensor parallelism cuts.
        sequence: tokens of text.
        image_positions: positions that an image takes in the same sequence.
        vocabulary: rows of the embedding and the head, which tensor parallelism may cut unevenly; None where it cuts neither.
    """
    tp_key = CONFIG_KEYS["tp"]
    checks = [check_divisible(key, size, tp_key, mesh.tp) for key, size in cut.items()]
    if vocabulary is not None:
        checks.append(_check_vocabulary(vocabulary, mesh.tp))
    if sequence_parallel:
        checks.append(_check_sequence(sequence, image_positions, mesh.tp))
    stages = mesh.pp * interleave
    stages_key = "the number of pipeline stages (pipeline_parallel x pipeline_parallel_interleave_num)"
    if mesh.pp > 1:
        checks.append(check_divisible("model.num_layers", num_layers, stages_key, stages))
    return [problem for problem in checks if problem]


def _check_vocabulary(size: int, tp: int) -> LayoutProblem | None:
    """Every rank needs a row: nothing can be looked up in an empty embedding, nor the largest of no logits be found."""
    if piece(size, tp, tp - 1).length:
        return None
    tp_key = CONFIG_KEYS["tp"]
    return LayoutProblem(
        "model.vocab_size",
        size,
        f"{size} cut over {tp_key} {tp} makes pieces of {chunk_size(size, tp)}, and the last of them would be empty; "
        f"{(size // tp + 1) * tp} would work, or change {tp_key}",
    )


def _check_sequence(text: int, image: int, tp: int) -> LayoutProblem | None:
    """Sequence parallelism gives each rank as many positions."""
    key, tp_key = "training.seq_length", CONFIG_KEYS["tp"]
    if not image:
        return check_divisible(key, text, tp_key, tp)
    beyond = (text + image) % tp
    if not beyond:
        return None
    nearest = " or ".join(str(n) for n in (text - beyond, text - beyond + tp) if n > 0)
    return LayoutProblem(
        key,
        text,
        f"{text}, and the {image} positions of the image before it, make {text + image}, which is not divisible by "
        f"{tp_key} {tp}; {nearest} would work, or change {tp_key}",
    )


def check_experts(
    mesh: ParallelMesh, *, num_experts: int, expert_ffn_size: int, hidden_size: int
) -> list[LayoutProblem]:
    """What expert, tensor and fully sharded parallelism demand of stacked experts, each of which cuts a dimension of its own.

    FSDP2 cuts no dimension but the first unevenly.
    """
    dpm_key = "the ranks that shard one expert (data_parallel_shard / expert_parallel)"
    checks = [
        check_divisible("model.num_experts", num_experts, CONFIG_KEYS["ep"], mesh.ep),
        check_divisible("model.expert_ffn_size", expert_ffn_size, CONFIG_KEYS["tp"], mesh.tp),
        check_divisible("model.hidden_size", hidden_size, dpm_key, mesh.dp_shard // mesh.ep),
    ]
    return [problem for problem in checks if problem]
