"""What the ranks must hold, and where this step's gradients are.

A :class:`GradientPlan` is made once per list of parameters: which ranks take part, which of them must hold the same
list, and which rank counts a piece that several of them hold. All of it follows from the layout, never from which
gradients happen to exist, so that no rank can leave another waiting in a collective.

FSDP2 gives the gradients of one parameter group as views of a single buffer. An :class:`Arrangement` remembers where
they lie in it; the next step then needs one pass over the buffer instead of one operation per gradient. Each step
proves anew that the buffer holds nothing but these gradients and zero padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.core.norm_exchange import fingerprint
from hyper_parallel.platform.torch.grad_norm.arrangement import Arrangement, arrange, local_tensors
from hyper_parallel.platform.torch.grad_norm.partial import unmeasurable
from hyper_parallel.platform.torch.grad_norm.scope import (
    Holding,
    describe,
    lowest_is_this_rank,
    peers_of,
    replicas_of,
    require_within,
    scope_of,
)
from hyper_parallel.platform.torch.shared import (
    UnfinishedGradientsError,
    copies_of,
    is_finished,
    marks_of,
    settle,
    shared_groups,
)

_PLANS_KEPT = 16
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Names: TypeAlias = Callable[[], "Sequence[str] | None"]  # of the parameters, where they have some; asked for in messages only

_grad_of = attrgetter("grad")
_trainable = attrgetter("requires_grad")


class Found(NamedTuple):
    """This step's gradients: the present ones, in the order of the plan's list, and this rank's part of each.

    ``error`` says why they cannot be measured; the ranks must tell each other before one of them raises.
    """

    tensors: list[torch.Tensor]
    locals_: list[torch.Tensor]
    present: bytes
    arrangement: Arrangement
    error: Exception | None = None


class GradientPlan:
    """Everything about a list of parameters that does not change from step to step."""

    def __init__(self, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None, *, are_gradients: bool) -> None:
        self.are_gradients = are_gradients
        self.mesh = mesh  # kept alive, since the cache knows it by its id
        self.world = _world()
        self.flags = tuple(map(_trainable, tensors))
        self.layouts = _layouts(tensors)
        self.marks = marks_of(tensors)
        kept: dict[int, int] = {}
        for index, tensor in enumerate(tensors):
            if are_gradients or tensor.requires_grad:
                kept.setdefault(id(tensor), index)
        self.indices = None if len(kept) == len(tensors) else list(kept.values())
        chosen = self.chosen(tensors)
        self.error: Exception | None = None
        self.scope = scope_of(tensors, mesh)  # frozen ones too: a rank on which all are frozen still takes part
        self.peers = peers_of(self.scope, mesh)
        holdings: dict[tuple[Any, ...], Holding] = {}
        try:
            require_within(self.scope, tensors)
            self.holdings = [self._holding(tensor, holdings) for tensor in chosen]
        except ValueError as error:
            self.error, self.holdings = error, [Holding(self.peers, False)] * len(chosen)
        self.shared = [] if are_gradients else [index for index, tensor in enumerate(chosen) if shared_groups(tensor)]
        # shared with ranks that the layout does not know of
        self.tied = {i for i in self.shared if set(copies_of(chosen[i])) - set(self.holdings[i].replicas)}
        self.all_present = b"\x01" * len(chosen)
        self._parameter_layouts = [getattr(tensor, "_spec", None) for tensor in chosen]
        self.list_fingerprint = fingerprint("\n".join(map(describe, chosen))) if chosen else 0
        self.peers_fingerprint = fingerprint(repr(self.peers))
        replicas = {holding.replicas for holding in self.holdings}
        self.replicas_fingerprint = fingerprint(repr(replicas.pop())) if len(replicas) == 1 else 0
        self._fingerprints: dict[bytes, int] = {}
        self._arrangement: Arrangement | None = None

    def still_describes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors``, at the addresses of those of which the plan was made, have the same layouts and flags."""
        return (
            self.layouts == _layouts(tensors)
            and self.flags == tuple(map(_trainable, tensors))
            and self.marks == marks_of(tensors)
            and self.world is _world()
        )

    def unfinished(self, tensors: Sequence[torch.Tensor], names: Names) -> UnfinishedGradientsError | None:
        """Why no norm of shared parameters can be taken yet; None where their gradients are complete."""
        chosen = self.chosen(tensors) if self.shared else ()
        parts = [index for index in self.shared if not is_finished(chosen[index])]
        if not parts:
            return None
        return UnfinishedGradientsError(
            f"the gradients of {len(parts)} parameters (first: {self.name(parts[0], names())}) are only this rank's part, or were "
            "changed after they were completed; call hyper_parallel.finish_gradients(model, mesh) after backward, and scale "
            "gradients before it rather than after"
        )

    def note_scaled(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gradients that were complete before they were scaled are complete after it."""
        chosen = self.chosen(tensors) if self.shared else ()
        for index in self.shared:
            settle(chosen[index])

    def chosen(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The trainable ones, each once."""
        return tensors if self.indices is None else [tensors[index] for index in self.indices]

    def _holding(self, tensor: torch.Tensor, known: dict[tuple[Any, ...], Holding]) -> Holding:
        placed = (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else (0, None)
        groups = shared_groups(tensor)
        key = (*placed, copies_of(tensor) if groups else ())
        if key not in known:
            replicas = self.peers
            if isinstance(tensor, DTensor):
                replicas = replicas_of(tensor.device_mesh, tensor.placements, self.peers)
            # copies on ranks that the layout does not know of: tied across pipeline stages
            elsewhere = set(copies_of(tensor)) & set(self.scope.ranks) - set(replicas) if groups else ()
            leads = all(dist.get_rank() < rank for rank in elsewhere)
            known[key] = Holding(replicas, leads and lowest_is_this_rank(replicas), leads)
        return known[key]

    def find(self, tensors: Sequence[torch.Tensor]) -> Found:
        """This step's gradients."""
        chosen = self.chosen(tensors)
        found = list(chosen) if self.are_gradients else _gradients(chosen)
        gradients: list[Any] = found
        present = self.all_present
        try:
            locals_ = [gradient._local_tensor for gradient in gradients]
        except AttributeError:  # plain tensors or None among them
            present = bytes(map(is_not, found, repeat(None)))
            gradients = list(compress(found, present))
            locals_ = local_tensors(gradients)
        arrangement = self._arrangement
        if arrangement is None or not arrangement.holds(gradients, locals_, present):
            try:
                arrangement = self._arrangement = self.arrange(gradients, locals_, present, self.counts)
            except ValueError as error:
                return Found([], [], present, arrange([], [], present, []), error)
        return Found(gradients, locals_, present, arrangement)

    def recognise(self, tensors: Sequence[torch.Tensor]) -> Found | None:
        """:meth:`find` where all gradients lie in buffers as they did in the last step; else, or where unsure, None.

        As many trainable tensors, whose gradients have the layouts of this plan and tile the same buffers, are what the plan
        was made of: no two of them are one parameter, and all that the plan knows follows from the layouts.
        """
        arrangement = self._arrangement
        if arrangement is None or arrangement.single or self.indices is not None or len(tensors) != len(self.flags):
            return None
        try:
            if self.world is not _world() or not all(map(_trainable, tensors)) or self.marks != marks_of(tensors):
                return None
            gradients: list[Any] = _gradients(tensors)
            locals_ = [gradient._local_tensor for gradient in gradients]
        except AttributeError:  # plain tensors or None among them
            return None
        if not arrangement.holds(gradients, locals_, self.all_present):
            return None
        return Found(gradients, locals_, self.all_present, arrangement)

    def arrange(
        self,
        gradients: list[torch.Tensor],
        locals_: list[torch.Tensor],
        present: bytes,
        counts: Callable[[int], bool],
    ) -> Arrangement:
        """Lay out ``gradients``; ``counts(index)`` says whether the piece of parameter ``index`` counts here."""
        indices = list(compress(range(len(present)), present))
        for index, gradient in zip(indices, gradients, strict=True):
            self._check_gradient(index, gradient)
        tied = [index in self.tied for index in indices] if self.tied else None
        return arrange(gradients, locals_, present, [counts(index) for index in indices], tied)

    def counts(self, index: int) -> bool:
        """Whether this rank counts the piece of parameter ``index`` that it holds."""
        return self.holdings[index].counts

    def present_fingerprint(self, present: bytes) -> int:
        """A fingerprint of which parameters have a gradient."""
        if present not in self._fingerprints:
            self._fingerprints = {present: fingerprint(present)}
        return self._fingerprints[present]

    def name(self, index: int, names: Sequence[str] | None) -> str:
        """How to call parameter ``index`` of this plan in a message."""
        original = index if self.indices is None else self.indices[index]
        return names[original] if names else f"index {original}"

    def _check_gradient(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise ValueError(f"gradient {index} is sparse; call .to_dense() on it first")
        if gradient.is_meta or not (gradient.is_complex() or gradient.dtype in _FLOATING):
            raise ValueError(
                f"gradient {index} is {gradient.dtype} on {gradient.device}; a norm needs float64, float32, bfloat16, "
                "float16 or complex values"
            )
        if not isinstance(gradient, DTensor):
            return
        if operation := unmeasurable(gradient):
            raise ValueError(
                f"gradient {index} has placements {gradient.placements}: a norm of parts that combine by {operation} is not "
                "defined before they are combined; redistribute it first"
            )
        layout = self._parameter_layouts[index]
        if layout is not None and not _agree(layout.placements, gradient.placements):
            raise ValueError(
                f"gradient {index} has placements {gradient.placements}, its parameter {layout.placements}; "
                "redistribute the gradient to its parameter's placements"
            )


def locate(
    tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None, *, are_gradients: bool, names: Names = lambda: None
) -> tuple[GradientPlan, Found]:
    """The plan for this list and this step's gradients. ``names`` are for messages.

    Raises:
        TypeError, ValueError: no norm of these tensors can be defined, and nothing among them says which ranks to tell.
    """
    global _latest
    found = None
    if _latest is not None and _latest.mesh is mesh and not are_gradients:
        found = _latest.recognise(tensors)
    if _latest is None or found is None:
        plan, wrong = _known_plan(tensors, mesh) if not are_gradients else None, None
        if plan is None:
            wrong = _not_tensors(tensors)
            if wrong is not None:
                tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            plan = _new_plan(tensors, mesh, are_gradients=are_gradients)
        wrong = wrong or plan.error
        if wrong is not None:
            if plan.scope.group is None:
                raise wrong
            nothing = Found([], [], plan.all_present, arrange([], [], plan.all_present, []), wrong)
            return plan, nothing
        if not are_gradients:
            _latest = plan
        found = plan.find(tensors)
    else:
        plan = _latest
    if plan.shared and found.error is None:
        found = found._replace(error=plan.unfinished(tensors, names))
    return plan, found


def _not_tensors(tensors: Sequence[Any]) -> Exception | None:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            return TypeError(f"entry {index} of the list is a {type(tensor).__name__}, not a tensor")
    return None


def _known_plan(tensors: Sequence[Any], mesh: DeviceMesh | None) -> GradientPlan | None:
    """The plan for this list, where the same tensors with the same layouts were seen before.

    An id is only unique while its object lives, and a parameter may become another one in place (``Module.to`` swaps DTensors,
    which it could not do if the cache held so much as a weak reference): what a plan follows from is compared each time.
    """
    plan = _plans.get((tuple(map(id, tensors)), id(mesh)))
    try:
        return plan if plan is not None and plan.still_describes(tensors) else None
    except AttributeError:  # what is there now is no tensor
        return None


def _new_plan(tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None, *, are_gradients: bool) -> GradientPlan:
    plan = GradientPlan(tensors, mesh, are_gradients=are_gradients)
    if not are_gradients:  # which are new tensors in every step
        _plans[tuple(map(id, tensors)), id(mesh)] = plan
        while len(_plans) > _PLANS_KEPT:
            _plans.popitem(last=False)
    return plan


_plans: OrderedDict[Any, GradientPlan] = OrderedDict()
_latest: GradientPlan | None = None


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """``main_grad`` where a parameter has one, else ``.grad``."""
    found = list(map(_grad_of, parameters))
    if any(map(hasattr, parameters, repeat("main_grad"))):
        for index, parameter in enumerate(parameters):
            main_grad = getattr(parameter, "main_grad", None)
            found[index] = found[index] if main_grad is None else main_grad
    return found


def _layouts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The DTensors' layouts, the shape of a plain tensor."""
    try:
        return [tensor._spec for tensor in tensors]  # type: ignore[attr-defined]
    except AttributeError:
        return [getattr(tensor, "_spec", None) or tensor.shape for tensor in tensors]


def _agree(parameter: Sequence[Any], gradient: Sequence[Any]) -> bool:
    """Whether a gradient lies as its parameter does, or would once its parts are added up."""
    if len(parameter) != len(gradient):
        return False
    return all(p == g or (p.is_replicate() and g.is_partial()) for p, g in zip(parameter, gradient, strict=True))


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None
