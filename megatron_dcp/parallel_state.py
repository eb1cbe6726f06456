"""The DCP groups, beside those of ``megatron.core.parallel_state``.

The only module state of the package. Everything else takes groups as arguments, usually from
`get_process_group_collection`. Which ranks form which group: see `megatron_dcp.rank_groups`.

Under torchrun::

    initialize_distributed()
    initialize_model_parallel(tensor_model_parallel_size=2, decode_context_parallel_size=2)

Inside a training stack that has called Megatron's ``initialize_model_parallel`` already::

    initialize_model_parallel(decode_context_parallel_size=2)  # attaches to Megatron's groups
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dcp.config import DcpLayout, ParallelConfig
from megatron_dcp.distributed import initialize_distributed as initialize_distributed
from megatron_dcp.distributed import time_limit
from megatron_dcp.rank_groups import DEFAULT_ORDER, Groups, dcp_groups, drivers, megatron_groups


@dataclass(frozen=True)
class _State:
    parallel: ParallelConfig
    dcp: ProcessGroup
    tp_dcp: ProcessGroup
    replica: ProcessGroup
    driver: int
    created: tuple[ProcessGroup, ...]
    megatron: tuple[ProcessGroup, ...]  # its groups, where this module had them made
    # The default group at the time: another one now means that a caller tore everything down under us.
    world: ProcessGroup | None


_state: _State | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    *,
    decode_context_parallel_size: int = 1,
    dcp_layout: DcpLayout = "orthogonal",
    **megatron_arguments: Any,
) -> None:
    """Make the DCP groups, and Megatron's own groups first where they do not exist. Call it on every rank.

    Where Megatron's groups exist, this attaches to them: sizes that are given must be theirs, sizes that are left
    out are taken from them, and arguments that only say how Megatron makes its groups have no effect.

    Args:
        tensor_model_parallel_size: ``None``: that of Megatron's groups, 1 where there are none. The same holds for
            ``pipeline_model_parallel_size`` and the sizes in ``megatron_arguments``.
        decode_context_parallel_size: Ranks that share the KV cache of a sequence.
        dcp_layout: ``orthogonal`` or ``within_tp``, see `ParallelConfig`.
        megatron_arguments: Any other argument of ``megatron.core.parallel_state.initialize_model_parallel``.

    Raises:
        ValueError: On every rank, whichever rank it concerns: a size does not fit the world, differs from
            Megatron's existing groups or between ranks, or the DCP groups exist already.
        RuntimeError: ``torch.distributed`` is not initialised.
    """
    global _state
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call initialize_distributed() first")
    from megatron.core import parallel_state as mpu

    sizes = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
    }
    given = {name: value for name, value in (sizes | megatron_arguments).items() if value is not None}
    dcp = {"decode_context_parallel_size": decode_context_parallel_size, "dcp_layout": dcp_layout}
    parallel, attach = _same_plan_on_all(given, dcp)
    if (limit := time_limit()) is not None:
        given.setdefault("distributed_timeout_minutes", limit.total_seconds() / 60)
    own_megatron: tuple[ProcessGroup, ...] = ()
    if not attach:
        before = _groups_of_world()
        try:
            mpu.initialize_model_parallel(**given)
        except BaseException:
            mpu.destroy_model_parallel()  # half-made groups would block every later call
            _destroy(group for group in _groups_of_world() if group not in before)
            raise
        own_megatron = tuple(group for group in _groups_of_world() if group not in before)
    table, megatron = _gather_megatron_groups()
    if not attach or "order" in given:
        expected = megatron_groups(dist.get_world_size(), parallel, given.get("order", DEFAULT_ORDER))
        if any(expected[name] != groups for name, groups in table.items()):
            raise ValueError(f"order={given.get('order')!r} is not that of Megatron's existing groups; leave it out")
    minutes = given.get("distributed_timeout_minutes")
    timeout = None if minutes is None else timedelta(minutes=minutes)
    wanted = dcp_groups(table, parallel)
    made, created = _make_groups(wanted, table, megatron, timeout, given.get("nccl_communicator_config_path"))
    driver = drivers(table | wanted)[dist.get_rank()]
    _state = _State(
        parallel=parallel, **made, driver=driver, created=created, megatron=own_megatron, world=dist.group.WORLD,
    )  # fmt: skip


def is_initialized() -> bool:
    """Whether the DCP groups exist and belong to the ``torch.distributed`` world of now."""
    return _state is not None and dist.is_initialized() and _state.world is dist.group.WORLD


def megatron_is_initialized() -> bool:
    """Whether Megatron's own groups exist, whoever made them."""
    from megatron.core import parallel_state as mpu

    return bool(mpu.model_parallel_is_initialized())


def destroy_model_parallel(*, destroy_megatron: bool | None = None) -> None:
    """Destroy the DCP groups; nothing happens where there are none.

    Args:
        destroy_megatron: Whether to destroy Megatron's groups too; ``None``: where this module made them.
    """
    global _state
    if _state is None:
        return
    state, alive = _state, is_initialized()
    _state = None
    groups = state.created if alive else ()
    if state.megatron if destroy_megatron is None else destroy_megatron:
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()  # forgets its groups and leaves them, with their threads, to torch
        groups += state.megatron if alive else ()
    _destroy(groups)


def _groups_of_world() -> list[ProcessGroup]:
    """All groups of ``torch.distributed`` that this rank is in, the oldest first."""
    return list(dist.distributed_c10d._world.pg_map)


def _destroy(groups: Iterable[ProcessGroup]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError):  # destroyed by somebody else
            dist.destroy_process_group(group)


def get_decode_context_parallel_group() -> ProcessGroup:
    """The ranks over which the KV cache of a sequence is sharded."""
    return _get().dcp


def get_decode_context_parallel_world_size() -> int:
    """``D``, the size of the DCP group."""
    return _get().dcp.size()


def get_decode_context_parallel_rank() -> int:
    """This rank's place in the DCP group."""
    return _get().dcp.rank()


def get_tp_dcp_group() -> ProcessGroup:
    """The ranks that share one layer of one copy of the model: tp x dcp, with ``within_tp`` the TP group."""
    return _get().tp_dcp


def get_replica_group() -> ProcessGroup:
    """The ranks that decode one batch together: tp x dcp x pp."""
    return _get().replica


def get_dcp_layout() -> DcpLayout:
    """``orthogonal`` or ``within_tp``."""
    return _get().parallel.dcp_layout


def get_parallel_config() -> ParallelConfig:
    """The sizes of all groups."""
    return _get().parallel


def get_process_group_collection() -> Any:
    """Megatron's ``ProcessGroupCollection`` of this rank, with the DCP groups on it.

    Adds the attributes ``dcp``, ``tp_dcp``, ``dcp_replica`` (groups), ``dcp_driver`` (int: the rank in ``dcp_replica``
    that decides for it, tp and dcp rank 0 of the last pipeline stage) and ``dcp_layout`` (str). Models and layers that
    are built with it as ``pg_collection`` find them there.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    state = _get()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    # Plain attributes: the constructor refuses names that Megatron does not know.
    collection.dcp = state.dcp
    collection.tp_dcp = state.tp_dcp
    collection.dcp_replica = state.replica
    collection.dcp_driver = state.driver
    collection.dcp_layout = state.parallel.dcp_layout
    return collection


def _get() -> _State:
    if _state is None or not is_initialized():
        raise RuntimeError(
            "the DCP groups are not initialised; call megatron_dcp.parallel_state.initialize_model_parallel() first"
        )
    return _state


def _same_plan_on_all(given: dict[str, Any], dcp: dict[str, Any]) -> tuple[ParallelConfig, bool]:
    """The sizes to use and whether Megatron's groups exist; ``ValueError`` on every rank unless all ranks agree."""
    error: Exception | None = None
    plan = None
    try:
        plan = _plan(given, dcp)
    except Exception as caught:  # every rank has to hear of it, whatever it is
        error = caught
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (plan, given.get("order"), error and f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (theirs, order, message) in enumerate(reports):
        if message is not None:
            raise ValueError(f"rank {rank} cannot initialise its groups: {message}")
        if (theirs, order) != (plan, given.get("order")):
            raise ValueError(
                f"rank {dist.get_rank()} and rank {rank} were given different sizes or have different groups; call "
                f"this with the same arguments everywhere: {_describe(plan, given.get('order'))} against "
                f"{_describe(theirs, order)}"
            )
    assert plan is not None
    return plan


def _describe(plan: tuple[ParallelConfig, bool] | None, order: str | None) -> str:
    assert plan is not None
    return f"{plan[0]}, order={order!r}, {'attached to' if plan[1] else 'without'} Megatron's groups"


def _plan(given: dict[str, Any], dcp: dict[str, Any]) -> tuple[ParallelConfig, bool]:
    if is_initialized():
        raise ValueError(
            "the DCP groups exist already; call megatron_dcp.parallel_state.destroy_model_parallel() first"
        )
    for name, only in {
        "rank_offset": 0,
        "local_world_size": dist.get_world_size(),
        "gtp_remat_size": 1,
        "expert_gtp_remat_size": 1,
    }.items():
        if given.get(name, only) != only:
            raise ValueError(f"{name}={given[name]!r} does not go with decode context parallelism; leave it out")
    attach = megatron_is_initialized()
    sizes = {name: given[name] for name in _SIZES if name in given}
    if attach:
        existing = _existing_sizes()
        for name, value in existing.items():
            if given.get(name, value) != value:
                raise ValueError(
                    f"{name}={given[name]} differs from the {value} of the groups that Megatron has; leave it out or "
                    f"pass {value}, or call megatron.core.parallel_state.destroy_model_parallel() first"
                )
        sizes = {name: existing[name] for name in _SIZES}
    parallel = ParallelConfig(**sizes, **dcp)
    parallel.check_world_size(dist.get_world_size())
    if not attach or "order" in given:
        megatron_groups(dist.get_world_size(), parallel, given.get("order", DEFAULT_ORDER))
    return parallel, attach


_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _existing_sizes() -> dict[str, int | None]:
    from megatron.core import parallel_state as mpu

    try:
        covered = len(dist.get_process_group_ranks(mpu.get_model_parallel_group()))
    except (KeyError, ValueError):
        raise ValueError(
            "Megatron's groups belong to a torch.distributed world that was destroyed; call "
            "megatron.core.parallel_state.destroy_model_parallel() first"
        ) from None
    tp = mpu.get_tensor_model_parallel_world_size()
    pp = mpu.get_pipeline_model_parallel_world_size()
    copies = mpu.get_data_parallel_world_size(with_context_parallel=True)
    # Neither holds where Megatron cut weights over further ranks (gtp_remat) or left ranks out (rank_offset).
    if covered != tp * pp or copies * covered != dist.get_world_size():
        raise ValueError(
            f"Megatron's groups are tp {tp} x pp {pp} x dp and cp {copies} in a world of {dist.get_world_size()}, with "
            f"{covered} ranks for one copy of the weights; initialise Megatron without gtp_remat_size and rank_offset"
        )
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": mpu.get_context_parallel_world_size(),
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": mpu.get_virtual_pipeline_model_parallel_world_size(),
    }


def _gather_megatron_groups() -> tuple[dict[str, Groups], dict[str, ProcessGroup]]:
    """Megatron's groups as they really are: all members of all groups, and this rank's group objects."""
    from megatron.core import parallel_state as mpu

    own = {
        "tp": mpu.get_tensor_model_parallel_group(),
        "pp": mpu.get_pipeline_model_parallel_group(),
        "cp": mpu.get_context_parallel_group(),
        "mp": mpu.get_model_parallel_group(),
        "dp_cp": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    members = {name: tuple(sorted(dist.get_process_group_ranks(group))) for name, group in own.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, members)
    return {name: sorted(map(list, {of_rank[name] for of_rank in everywhere})) for name in own}, own


def _make_groups(
    wanted: dict[str, Groups],
    table: dict[str, Groups],
    megatron: dict[str, ProcessGroup],
    timeout: timedelta | None,
    nccl_config: str | None,
) -> tuple[dict[str, ProcessGroup], tuple[ProcessGroup, ...]]:
    """This rank's group of every wanted name, and those of them that are new.

    One communicator for one set of ranks: a name whose groups are those of Megatron's tp, cp or mp, or of an earlier
    name, shares their objects. All ranks hold the same table, so all take the same decisions in the same order.
    """
    known = [(table[name], megatron[name]) for name in ("tp", "cp", "mp")]
    made: dict[str, ProcessGroup] = {}
    created = []
    for name, groups in wanted.items():
        group = next((group for members, group in known if members == groups), None)
        if group is None:
            options = _nccl_options(name, nccl_config)
            for ranks in groups:  # new_group must be called by all ranks for all groups, members or not
                new = dist.new_group(ranks, timeout=timeout, pg_options=options, group_desc=f"DCP_{name.upper()}")
                if dist.get_rank() in ranks:
                    group = new
            assert group is not None
            created.append(group)
            known.append((groups, group))
        made[name] = group
    return made, tuple(created)


def _nccl_options(name: str, config_path: str | None) -> Any:
    """Options of a new communicator; ``None`` where it is not NCCL's.

    A decode step waits for its exchanges, so these run on streams of high priority, unless the file that Megatron's
    ``nccl_communicator_config_path`` names says otherwise: its sections ``dcp``, ``tp_dcp`` and ``replica`` are for
    these groups.
    """
    if "nccl" not in dist.get_backend():
        return None
    from megatron.core.parallel_state import get_nccl_options

    settings: dict[str, Any] = {}
    if config_path is not None:
        import yaml  # type: ignore[import-untyped]

        with open(config_path, encoding="utf-8") as file:
            settings = yaml.safe_load(file) or {}
    return get_nccl_options(name, {name: {"is_high_priority_stream": True, **settings.get(name, {})}})
