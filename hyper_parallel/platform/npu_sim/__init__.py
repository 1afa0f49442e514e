"""A simulated NPU: torch's device "npu" in host memory, so that the accelerator's code path runs where there is none.

``install()`` gives the process a device "npu", a backend "hccl" (gloo, for that device alone) and ``torch.npu``. It is written
in Python, over torch's PrivateUse1 device; nothing is compiled. In a script of one's own, also under torchrun::

    from hyper_parallel.platform import npu_sim
    npu_sim.install()
    dist.init_process_group("hccl")
    model = model.to("npu")

What it shows as hardware would: on which device each tensor lives and every copy between host and device (:func:`copies`); a
CPU tensor in a collective of an accelerator-only group (c10d's own error); CPU tensors mixed
with the device's; pinned memory; a read of a parameter buffer that FSDP2 has freed (NaN); optimizer and autocast defaults of
accelerators; with ``strict_dtypes`` also dtypes that Ascend refuses.

What it does not show: a missing wait between streams, since everything runs at once in the calling thread; memory use, since
nothing is freed before its last view is; speed; rounding of the real device, since the CPU's kernels compute. Every index means
the one device of the process. ``torch.Generator("npu")``, ``torch.empty(pin_memory=True)`` and ``torch.accelerator.synchronize``
are not there, and ``torch.UntypedStorage(n, device="npu")`` ends the process: torch looks for an allocator in C++. Autograd of a
thread other than the one that installed the device goes through a thread of torch's, which may disturb the end of the process.
"""

from hyper_parallel.platform.npu_sim.copying import Copies, copies
from hyper_parallel.platform.npu_sim.install import SimulatedNpuError, install, obstacle

__all__ = ["Copies", "SimulatedNpuError", "copies", "install", "obstacle"]
