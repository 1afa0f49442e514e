"""Shards by arithmetic, against what fully_shard makes of the same model on the meta device, up to 128 ranks."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_parallel
from hpcli.models.parallel import parallel_plan
from hpcli.models.stages import stage_shapes, whole_model
from hpcli.models.torch.decoder import Decoder
from hpcli.plan.shards import held_by, rank_classes
from hpcli.train.precision import precision_policy
from hyper_parallel.platform.torch.mesh import forget_meshes

SIZES = {"vocab_size": 1003, "hidden_size": 256, "num_layers": 3, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 520}
LAYOUTS = {
    "fsdp128": ({"preset": "decoder-tiny", **SIZES}, {"data_parallel_shard": 128}),
    "hsdp4x32": ({"preset": "decoder-tiny", **SIZES}, {"data_parallel_replicate": 4, "data_parallel_shard": 32}),
    "fsdp16 tp8": ({"preset": "decoder-tiny", **SIZES}, {"data_parallel_shard": 16, "tensor_parallel": 8}),
    "fsdp64 ep8 tp2": (
        {"preset": "moe-tiny", **SIZES, "num_experts": 16, "expert_ffn_size": 24},
        {"data_parallel_shard": 64, "expert_parallel": 8, "tensor_parallel": 2},
    ),
}


@pytest.mark.parametrize("unit", ["layer", "model"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_units_and_shards_are_those_of_fully_shard(resolve, name, unit):
    model, parallelism = LAYOUTS[name]
    training = {"global_batch_size": 128, "seq_length": 16}
    resolved = resolve(128, model=model, parallelism=parallelism, training=training, fsdp_config={"unit": unit})
    config, mesh = resolved.config, resolved.mesh
    for rank in (0, 77, 127):
        (stage,) = held_by(config, mesh, rank)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=128)
        try:
            forget_meshes()
            with torch.device("meta"):
                module = Decoder(config.model, whole_model(config.model))
            plan, policy = parallel_plan(config), precision_policy(config)
            hyper_parallel.parallelize(module, mesh, plan, policy, device_type="cpu")
            states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
            groups = {id(group): group for state in states for group in state._fsdp_param_groups}.values()
            real = [
                (
                    len(group.fsdp_params),
                    sum(p.sharded_param.to_local().numel() for p in group.fsdp_params),
                    sum(p._sharded_param_data.numel() for p in group.fsdp_params),
                )
                for group in groups
            ]
        finally:
            dist.destroy_process_group()
            forget_meshes()
        assert sorted(real) == sorted((unit.parameters, unit.held, unit.shard) for unit in stage.units), f"rank {rank}"


def test_classes_hold_every_rank_once_and_ranks_of_one_class_hold_as_much(resolve):
    model, parallelism = LAYOUTS["fsdp16 tp8"]
    training = {"global_batch_size": 128, "seq_length": 16}
    resolved = resolve(128, model=model, parallelism=parallelism, training=training)
    classes = rank_classes(resolved.config, resolved.mesh)
    assert sum(ranks.ranks for ranks in classes) == 128
    for ranks in classes:
        held = {
            tuple(unit.held for stage in held_by(resolved.config, resolved.mesh, rank) for unit in stage.units)
            for shard in ranks.dp_shard
            for tensor in ranks.tp
            if (rank := resolved.mesh.rank_at(dp_shard=shard, tp=tensor)) >= 0
        }
        assert len(held) == 1, ranks


def test_all_ranks_together_hold_the_model_once(resolve):
    model, parallelism = LAYOUTS["fsdp128"]
    resolved = resolve(128, model=model, parallelism=parallelism, training={"global_batch_size": 128})
    config, mesh = resolved.config, resolved.mesh
    held = sum(unit.held for rank in range(128) for stage in held_by(config, mesh, rank) for unit in stage.units)
    assert held == sum(prod(shape) for shape in stage_shapes(config.model, whole_model(config.model)).values())
