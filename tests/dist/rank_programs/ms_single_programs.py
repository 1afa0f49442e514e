"""Rank programs in MindSpore for one rank: what is computed here, beside torch's or NumPy's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def optimizers(name: str, steps: int, **options: Any) -> dict[str, Any]:
    """The largest difference from torch's optimizer of that name after some steps."""
    import mindspore as ms
    import torch

    from hyper_parallel.platform.mindspore import optimizer

    values = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    ours = [ms.Parameter(ms.Tensor(v), name=f"p{i}") for i, v in enumerate(values)]
    theirs = [torch.nn.Parameter(torch.from_numpy(v.copy())) for v in values]
    step = getattr(optimizer, name)(ours, lr=0.1, **options)
    reference = getattr(torch.optim, name)(theirs, lr=0.1, **options)
    for number in range(steps):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            gradient = np.random.default_rng([number, index]).normal(size=mine.shape).astype(np.float32)
            mine.grad, other.grad = ms.Tensor(gradient), torch.from_numpy(gradient.copy())
        if number == 1:
            ours[1].grad = theirs[1].grad = None  # a parameter without a gradient stays as it is
        step.step()
        reference.step()
    pairs = zip(ours, theirs, strict=True)
    difference = max(float(np.abs(mine.asnumpy() - other.detach().numpy()).max()) for mine, other in pairs)
    return {"difference": difference, "moved": float(np.abs(ours[0].asnumpy() - values[0]).max())}


def optimizer_guard() -> dict[str, str]:
    """What the guard says of MindSpore's own Adam, of one that works, and of what an optimizer refuses."""
    import mindspore as ms

    from hyper_parallel.platform.mindspore.optimizer import SGD, guarded_step

    def parameters(dtype: Any = ms.float32) -> list[Any]:
        made = [ms.Parameter(ms.Tensor(np.ones(3, np.float32)).astype(dtype), name="weight")]
        made[0].grad = ms.Tensor(np.ones(3, np.float32))
        return made

    told = {}
    weight = parameters()
    theirs = ms.mint.optim.Adam(weight, lr=0.1)
    for name, step, listed in (
        ("mint.optim.Adam", lambda: theirs((weight[0].grad,)), weight),
        ("SGD", SGD(own := parameters(), lr=0.1).step, own),
    ):
        try:
            guarded_step(step, listed)
            told[name] = "changed"
        except RuntimeError as error:
            told[name] = f"{type(error).__name__}: {error}"
    for name, listed in (("bfloat16", parameters(ms.bfloat16)), ("none", [])):
        try:
            SGD(listed, lr=0.1)
        except ValueError as error:
            told[name] = str(error)
    return told


def products(dtype: str) -> dict[str, Any]:
    """``linear`` and ``grouped_linear`` beside torch's in the same dtype: outputs and both gradients, bit for bit."""
    import mindspore as ms
    import torch

    from hyper_parallel.platform.mindspore import autograd
    from hyper_parallel.platform.mindspore.functional import grouped_linear, linear

    rng = np.random.default_rng(0)

    def both(*shape: int) -> tuple[Any, Any]:
        values = rng.normal(size=shape).astype(np.float32)
        tensor = torch.from_numpy(values).to(getattr(torch, dtype)).requires_grad_()
        return ms.Tensor(values).astype(getattr(ms, dtype)), tensor

    def run(ours: Any, theirs: Any, x: Any, w: Any) -> dict[str, float]:
        with autograd.recording():
            y = ours(*(autograd.requiring_grad(t[0]) for t in (x, w)))
        z = theirs(x[1], w[1])
        seed, other = both(*y.shape)
        found = [y, *autograd.backward(y, seed, [x[0], w[0]])]
        wanted = [z, *torch.autograd.grad(z, (x[1], w[1]), other.detach())]
        names = ("output", "dx", "dw")
        return {
            n: float(np.abs(a.astype(ms.float32).asnumpy() - b.detach().float().numpy()).max(initial=0))
            for n, a, b in zip(names, found, wanted, strict=True)
        }

    counts = [2, 0, 3, 0]

    def by_expert(x: Any, w: Any) -> Any:
        return torch.cat([part @ weight.T for part, weight in zip(x.split(counts), w, strict=True)])

    return {
        "linear": run(linear, torch.nn.functional.linear, both(2, 3, 8), both(4, 8)),
        "no rows": run(linear, torch.nn.functional.linear, both(0, 8), both(4, 8)),
        "experts": run(lambda x, w: grouped_linear(x, w, counts), by_expert, both(5, 8), both(4, 6, 8)),
        "no rows for experts": run(
            lambda x, w: grouped_linear(x, w, [0] * 4), lambda x, w: x @ w.sum(0).T, both(0, 8), both(4, 6, 8)
        ),
    }


def cross_entropy_parts() -> dict[str, float]:
    """Cross entropy over one and over two parts of the vocabulary, beside torch's; run on two ranks."""
    import mindspore as ms
    import torch

    from hyper_parallel.platform.mindspore import autograd, collectives
    from hyper_parallel.platform.mindspore.cross_entropy import vocabulary_parallel_cross_entropy

    rank = collectives.rank()
    values = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32) * 30  # exp overflows float32 unless it is shifted
    targets = np.array([0, 7, -100, 3, 4], np.int32)
    logits = torch.from_numpy(values.copy()).requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets).long(), ignore_index=-100, reduction="sum")
    loss.backward()
    told = {}
    both = collectives.make_group([(0, 1)])
    alone = collectives.Group((rank,), 0, None)
    for name, group in (("two", both), ("one", alone)):
        columns = slice(4 * group.position, 4 * group.position + 4) if group.size == 2 else slice(None)
        part = ms.Tensor(values[:, columns].copy())
        with autograd.recording():
            ours = vocabulary_parallel_cross_entropy(autograd.requiring_grad(part), ms.Tensor(targets), group)
        (gradient,) = autograd.backward(ours, None, [part])
        told[f"{name}: loss"] = abs(float(ours) / float(loss) - 1)
        told[f"{name}: gradient"] = float(np.abs(gradient.asnumpy() - logits.grad[:, columns].numpy()).max())
    return told
