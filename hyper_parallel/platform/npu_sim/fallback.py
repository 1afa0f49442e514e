"""Every operation of the simulated device that has no kernel of its own: its tensors' memory is lent to the CPU's kernel.

Torch's composite operations are taken apart by torch before they come here, as on any accelerator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from hyper_parallel.platform.npu_sim import generator, strict
from hyper_parallel.platform.npu_sim.memory import on_device, on_host

CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# These take indices from the host, on real accelerators too.
_HOST_INDICES = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))


class _Kind(NamedTuple):
    """What the schema of an operation says.

    Attributes:
        view: the result shares the memory of an argument that is not written to.
        outs: names of its ``out=`` arguments.
        takes_generator, draws: has an argument for a random generator; uses random numbers.
        host_indices: CPU tensors of any size are allowed.
        tensors: positions of its tensor arguments.
    """

    view: bool
    outs: tuple[str, ...]
    takes_generator: bool
    draws: bool
    host_indices: bool
    tensors: tuple[int, ...]


_kinds: dict[OpOverload, _Kind] = {}


def _kind(op: OpOverload) -> _Kind:
    found = _kinds.get(op)
    if found is None:
        schema = op._schema
        found = _kinds[op] = _Kind(
            view=any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns),
            outs=tuple(argument.name for argument in schema.arguments if argument.is_out),
            takes_generator=any(argument.name == "generator" for argument in schema.arguments),
            draws=torch.Tag.nondeterministic_seeded in op.tags,
            host_indices=schema.name.partition("::")[2] in _HOST_INDICES,
            tensors=tuple(place for place, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"),
        )
    return found


class _Loan:
    """The CPU tensors that stand for the ``npu`` arguments of one call.

    Attributes:
        hosts: kept alive until the results have been looked at, since a tensor is known by its id.
        originals: id of such a CPU tensor -> the argument whose memory it has.
        foreign: CPU tensors with dimensions among the arguments.
    """

    __slots__ = ("foreign", "hosts", "originals")

    def __init__(self) -> None:
        self.hosts: list[torch.Tensor] = []
        self.originals: dict[int, torch.Tensor] = {}
        self.foreign: list[torch.Tensor] = []

    def lend(self, argument: Any) -> Any:
        """``argument`` with its tensors and devices on the host."""
        if isinstance(argument, torch.Tensor):
            if argument.device.type == "npu":
                return self.note(on_host(argument), argument)
            if argument.dim():
                self.foreign.append(argument)
        elif isinstance(argument, (list, tuple)):
            return [self.lend(entry) for entry in argument]
        elif isinstance(argument, torch.device) and argument.type == "npu":
            return torch.device("cpu")
        return argument

    def note(self, host: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
        """Remember that ``host`` stands for ``original``."""
        self.hosts.append(host)
        self.originals[id(host)] = original
        return host

    def lend_out(self, original: torch.Tensor) -> torch.Tensor:
        """An ``out=`` argument; an empty one becomes a tensor that the kernel can resize."""
        host = on_host(original) if original.numel() else torch.empty(original.shape, dtype=original.dtype)
        return self.note(host, original)

    def give_back(self, result: Any) -> Any:
        """The results on the device: what is an argument as that argument."""
        if isinstance(result, torch.Tensor):
            original = self.originals.get(id(result))
            if original is not None:
                return original
            return on_device(result) if result.device.type == "cpu" else result
        if isinstance(result, (list, tuple)):
            return type(result)(self.give_back(entry) for entry in result)
        return result


def run_on_host(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` on the memory of its ``npu`` arguments and give its results back on the device.

    Raises:
        RuntimeError: CPU tensors among the arguments (single numbers are allowed, as on hardware); in strict mode, dtypes that
            Ascend refuses.
        NotImplementedError: there is no kernel for the operation.
    """
    kind = _kind(op)
    if kind.view:
        return op.redispatch(CPU_KEYS, *args, **kwargs)  # the CPU's kernel changes sizes and strides only
    if strict.enabled:
        strict.check(op, args, kwargs)
    loan = _Loan()
    outs = {name: kwargs.pop(name) for name in kind.outs if name in kwargs}
    host_args = [loan.lend(argument) for argument in args]
    host_kwargs = {name: loan.lend(argument) for name, argument in kwargs.items()}
    for name, out in outs.items():
        host_kwargs[name] = [loan.lend_out(entry) for entry in out] if isinstance(out, (list, tuple)) else loan.lend_out(out)
    if loan.foreign and not kind.host_indices:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu! "
            f"(when calling {op}, with a CPU tensor of shape {tuple(loan.foreign[0].shape)})"
        )
    if kind.takes_generator or kind.draws:
        generator.advance(host_kwargs if kind.takes_generator else None)
    # torch hands over a number that it had wrapped into a tensor as a number again, which not every overload for tensors takes
    numbers = any(isinstance(host_args[place], (int, float, complex)) for place in kind.tensors if place < len(host_args))
    try:
        result = (op.overloadpacket if numbers else op)(*host_args, **host_kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"the simulated NPU has no kernel for {op}: it borrows the CPU's, which has none ({_first_line(error)})"
        ) from error
    if outs:
        _restore_shapes(loan)
    return loan.give_back(result)


def _restore_shapes(loan: _Loan) -> None:
    """What the kernel resized, it resized on the host."""
    for host in loan.hosts:
        original = loan.originals[id(host)]
        if host.shape != original.shape:
            original.set_(on_device(host))  # type: ignore[call-overload]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
