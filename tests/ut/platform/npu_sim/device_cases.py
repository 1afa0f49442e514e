"""What the simulated device does in one process. Run by ``test_device.py`` in a process of its own, since it cannot be removed."""

from __future__ import annotations

import io
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.platform import npu_sim
from hyper_parallel.platform.npu_sim import memory, strict

npu_sim.install()


@pytest.fixture
def strict_dtypes():
    npu_sim.install(strict_dtypes=True)
    yield
    npu_sim.install(strict_dtypes=False)


def npu(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


# -- where things are -------------------------------------------------------------------------------------------------


def test_torch_npu_answers_and_installing_again_changes_nothing():
    npu_sim.install()
    assert torch.npu.is_available() and torch.npu.device_count() == 1 and torch.npu.current_device() == 0
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.get_device_module("npu").get_device_name() == "simulated NPU (host memory)"
    assert npu_sim.obstacle() is None


def test_every_index_means_the_one_device():
    torch.npu.set_device(3)
    assert torch.zeros(1, device="npu:3").device == torch.zeros(1).npu().device == torch.device("npu", 0)


def test_results_stay_on_the_device_and_views_share_memory():
    matrix = torch.arange(6.0, device="npu").view(2, 3)
    assert matrix.t().device.type == matrix[0].device.type == (matrix @ matrix.t()).device.type == "npu"
    assert (matrix @ matrix.t()).tolist() == [[5, 14], [14, 50]]
    matrix[1].mul_(10)
    assert matrix.tolist() == [[0, 1, 2], [30, 40, 50]]
    assert matrix.t().untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()


def test_in_place_returns_the_tensor_itself_and_out_may_be_empty():
    value = npu(1, 2)
    assert value.add_(1) is value and value.tolist() == [2, 3]
    out = torch.empty(0, device="npu")
    assert torch.cat([value, value], out=out) is out and out.tolist() == [2, 3, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_goes_there_and_back(dtype: torch.dtype):
    host = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert torch.equal(host.t().to("npu").cpu(), host.t()) and host.npu().dtype == dtype
    assert torch.equal(torch.empty(0, 3, dtype=dtype, device="npu").cpu(), torch.empty(0, 3, dtype=dtype))


def test_copies_are_counted():
    before = npu_sim.copies()
    value = torch.zeros(10).to("npu")
    (value + 1).cpu()
    torch.zeros(2).copy_(value[:2])
    value.sum().item()
    assert npu_sim.copies().since(before) == npu_sim.Copies(1, 2, 40, 48)


def test_host_tensors_do_not_mix_but_single_numbers_and_indices_do():
    value = npu(1, 2)
    for operation in (
        lambda: value + torch.ones(2),
        lambda: value.mul_(torch.ones(2)),
        lambda: torch.cat([value, torch.ones(2)]),
        lambda: F.linear(value, torch.ones(1, 2)),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device.*npu:0"):
            operation()
    assert (value * torch.tensor(3.0)).tolist() == [3, 6]
    assert value[torch.tensor([1, 0])].tolist() == [2, 1]


def test_what_has_no_kernel_says_so():
    with pytest.raises(NotImplementedError, match="the simulated NPU has no kernel for aten.cudnn_is_acceptable|aten._cudnn"):
        torch._cudnn_rnn_flatten_weight([npu(1)], 1, 1, 2, 1, 0, 1, False, False)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_equal_those_of_the_cpu():
    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3))
        model.to(device)
        loss = F.cross_entropy(model(torch.arange(32.0).view(2, 1, 4, 4).to(device)), torch.tensor([0, 2], device=device))
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for here, there in zip(gradients("cpu"), gradients("npu"), strict=True):
        assert there.device.type == "npu"
        torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-7)


def test_activation_checkpointing_replays_the_device_random_numbers():
    weight = torch.ones(64, device="npu", requires_grad=True)

    def layer(value: torch.Tensor) -> torch.Tensor:
        return F.dropout(value * weight, 0.5)

    out = checkpoint(layer, torch.ones(64, device="npu"), use_reentrant=False)
    out.sum().backward()
    assert 0 < int((out != 0).sum()) < 64
    assert torch.equal(weight.grad, out.detach())  # 2 where kept, 0 where dropped, in both passes


def test_the_same_seed_gives_the_same_numbers_and_a_saved_state_goes_on():
    torch.manual_seed(7)
    first, second = torch.rand(4, device="npu"), torch.rand(4, device="npu")
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4, device="npu"), first)
    state = torch.npu.get_rng_state()
    assert state.shape == (16,) and state.dtype == torch.uint8
    assert torch.equal(torch.rand(4, device="npu"), second) and not torch.equal(first, second)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="npu"), second)
    with pytest.raises(ValueError, match="16 bytes"):
        torch.npu.set_rng_state(torch.get_rng_state())


def test_autocast_lowers_products_only():
    value = torch.ones(2, 2, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (value @ value).dtype == F.linear(value, value).dtype == torch.bfloat16
        assert (value + value).dtype == torch.float32
    assert (value @ value).dtype == torch.float32


def test_backward_runs_in_the_calling_thread():
    seen = []
    value = torch.ones(1, device="npu", requires_grad=True)
    value.register_hook(lambda gradient: seen.append(threading.get_ident()))
    (value * 2).sum().backward()
    assert seen == [threading.get_ident()]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_pinned_memory_is_known_as_long_as_it_lives():
    host = torch.arange(6.0).view(2, 3).t()
    pinned = host.pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not host.is_pinned()
    assert pinned.pin_memory() is pinned and pinned.stride() == (1, 3) and torch.equal(pinned, host)
    assert npu(1, 2).to("cpu", non_blocking=True).is_pinned()
    count = len(memory._pinned)
    del pinned
    assert len(memory._pinned) < count
    assert torch.empty(0, 4).pin_memory().shape == (0, 4)


def test_a_freed_buffer_reads_as_nan_and_can_be_used_again():
    value = npu(1, 2, 3)
    half = torch.ones(4, dtype=torch.bfloat16, device="npu")
    for tensor in (value, half):
        tensor.untyped_storage().resize_(0)
        assert bool(tensor.isnan().all())
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        assert tensor.fill_(2).float().sum() == 2 * tensor.numel()
    with pytest.raises(RuntimeError, match="cannot grow a storage of 12 bytes to 13"):
        value.untyped_storage().resize_(13)
    host = torch.ones(3)
    host.untyped_storage().resize_(0)
    assert host.untyped_storage().size() == 0


def test_resizing_and_setting():
    value = npu(1, 2, 3, 4)
    assert value.resize_(2).tolist() == [1, 2] and value.resize_(4).tolist() == [1, 2, 3, 4]
    assert value.resize_(2, 3).flatten()[:4].tolist() == [1, 2, 3, 4] and value.device.type == "npu"
    source = npu(5, 6)
    assert value.set_(source).tolist() == [5, 6] and value.data_ptr() == source.data_ptr()
    assert value.set_(source.untyped_storage(), 1, (1,), (1,)).tolist() == [6]
    assert value.set_().numel() == 0


def test_saved_tensors_come_back_to_where_they_are_asked():
    file = io.BytesIO()
    torch.save({"a": npu(1, 2), "b": nn.Linear(1, 1).npu().state_dict()}, file)
    for place, device in ((None, "npu"), ("cpu", "cpu"), ("npu:0", "npu")):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert loaded["a"].tolist() == [1, 2] and loaded["a"].device.type == loaded["b"]["weight"].device.type == device


# -- strict mode ------------------------------------------------------------------------------------------------------


def test_half_in_place_with_float32_is_refused_in_strict_mode_only(strict_dtypes: None):
    half, wide, scalar = npu(2, dtype=torch.float16), npu(2), torch.tensor(2.0, device="npu")
    brain = half.bfloat16()
    for refused, name in (
        (lambda: half.mul_(scalar), "Half"),
        (lambda: half.add_(wide), "Half"),
        (lambda: half.div_(wide), "Half"),
        (lambda: brain.sub_(scalar), "BFloat16"),
        (lambda: torch._foreach_mul_([half, half], scalar), "Half"),
        (lambda: torch._foreach_div_([brain], [wide]), "BFloat16"),
    ):
        with pytest.raises(RuntimeError, match=f"result type Float can't be cast to the desired output type {name}"):
            refused()
    assert half.item() == 2 and brain.item() == 2
    # allowed: the same dtype, Python numbers, wide with half, results of their own, copies
    half.mul_(scalar.half()).mul_(2.0)
    assert half.item() == 8
    assert wide.mul_(half).item() == 16 and (half * scalar).item() == 16 and half.copy_(scalar).item() == 2
    npu_sim.install(strict_dtypes=False)
    assert half.mul_(scalar).item() == 4 and strict.enabled is False


def test_float64_arithmetic_is_refused_in_strict_mode_only(strict_dtypes: None):
    value = npu(1, 2).double()
    for refused in (
        lambda: value + value,
        lambda: value.sum(),
        lambda: torch.dot(value, value),
        lambda: torch.linalg.vector_norm(npu(3, 4), dtype=torch.float64),
    ):
        with pytest.raises(RuntimeError, match="on float64: the device has no float64 arithmetic"):
            refused()
    assert value.clone().cpu().tolist() == value.float().tolist() == torch.cat([value[:1], value[1:]]).tolist() == [1, 2]
    npu_sim.install(strict_dtypes=False)
    assert torch.dot(value, value).item() == 5


def test_fused_adamw_keeps_float32_state_beside_half_gradients_out_of_strict_modes_way(strict_dtypes: None):
    parameter = nn.Parameter(npu(1.0))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0, fused=True)
    parameter.grad = npu(3.0)
    optimizer.step()
    assert parameter.item() == pytest.approx(0.9)
    assert all(value.device.type == "npu" for value in optimizer.state[parameter].values())


def test_no_warning_is_left_over():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        npu_sim.install()


def test_a_number_beside_a_tensor_finds_the_overload_for_numbers():
    bits = torch.tensor([1.5, 6.0], device="npu").view(torch.int32)
    assert (bits & 0x7F800000).view(torch.float32).tolist() == [1.0, 4.0]
    assert (torch.tensor([5, 6], device="npu") ^ 3).tolist() == [6, 5]
    assert (torch.tensor([5, 6], device="npu") % 4).tolist() == [1, 2]
