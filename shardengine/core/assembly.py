"""Builds the parts of one engine, in order: analyse → agree → place → reducer → schedule → hooks.

Must not know: steps, the user's loop, the work of the parts after that.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardengine import kernels, stages
from shardengine.budget import (
    ALONE,
    BucketSizes,
    Footprint,
    bucket_elements,
    outside_bytes,
    prefetch_elements,
    settled,
    tell_choice,
    tell_window,
    wire_of,
)
from shardengine.comm import (
    Collectives,
    Mesh,
    compare,
    host_threads,
    measure_gathers,
    measure_reduction,
    run_on_all_ranks,
    settle_kernels,
)
from shardengine.config import STEPPING_APART, Config
from shardengine.core import replicas
from shardengine.core.kernel_trial import KernelTrial
from shardengine.core.parts import Core
from shardengine.ddp import BufferSync, CommHook, Reducer, Replicas, Rules, StepState, Window, comm_hooks
from shardengine.errors import ConfigError, UsageError
from shardengine.loading import Source
from shardengine.offload import BufferPool, Platform, Tiers
from shardengine.optim import Needs
from shardengine.runtime import (
    ActivationStore,
    Attachments,
    DeferredGather,
    GradientHooks,
    Schedule,
    Unit,
    UnshardState,
    WrittenWeights,
    activation_checkpointing,
    gradient_hooks,
    hooks,
    placing,
)
from shardengine.sharding import (
    Layout,
    LeftShards,
    Partition,
    holds_weights,
    inner,
    is_lookup,
    layout,
    partition,
    precision,
    stand_in,
)

_log = logging.getLogger(__name__)
_NOT_IN_WEIGHTS = "not in the weights, and begun as the model's code begins them: %s (%d in all)"


def _look(
    model: nn.Module,
    config: Config,
    groups: list[dict[str, Any]],
    mesh: Mesh,
    stage: stages.Stage,
    trial: KernelTrial,
    source: Source | None,
) -> tuple[Partition, kernels.Offers]:
    """The checks of model and machine that one rank does alone: returns the partition and the kernels, or raises."""
    if (left := LeftShards.on(model)) is not None:
        left.check(model, mesh.rank, mesh.ranks, mesh.platform)
    for name, buffer in model.named_buffers():
        given = source is not None and source.gives(buffer)
        if buffer.is_meta and mesh.rank == 0 and trial.device.type != "meta" and not given:
            raise UsageError(
                f"buffer {name!r} is on the meta device, it has no values: expected one with values on rank 0; "
                "to_empty does not fill it, so compute it anew as the model's __init__ does (from_pretrained does "
                "that)",
                code="model-buffer-without-values",
            )
    _refuse_adalora(model)
    units = config.zero_optimization.units
    if config.activation_checkpointing.enabled:
        activation_checkpointing.check(model, partition.find_units(model, units))
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    if mesh.rank == 0 and source is None and trial.device.type != "meta":
        partition.check_values(model, config.ignored_parameters)
    if dist.is_initialized():
        partition.check_sync_batch_norm(model, trial.device, mesh.ranks, dist.get_world_size)
    partition.check_max_norm(model, mesh.ranks)
    gradient_hooks.check(model)
    found = partition.analyse(
        model,
        units,
        group_of,
        shards_weights=stage.moves_weights,
        which=trial.precision,
        device=trial.device,
        ignored=config.ignored_parameters,
    )
    if config.bf16.enabled and config.bf16.split_masters:
        partition.check_split(found)
    for name, parameter in found.names.items():
        if source is not None and parameter.is_meta and not source.gives(parameter):
            raise UsageError(
                f"parameter {name!r} has no values, and neither weights= nor how it was made gives any: a parameter of "
                "several tensors (a quantised one) is expected with its values, on every rank",
                code="model-weights-without-values",
            )
    found = replace(found, source=source)
    if stage.steps_everything:
        found = partition.with_sparse(found, every=config.sparse_gradients)
    else:
        partition.check_dense(model, found, stage.name)
    return found, kernels.offer(trial.device, lambda: trial.run(found.specs))


def _refuse_adalora(model: nn.Module) -> None:
    """Raise ``UsageError`` for a trainable AdaLoRA adapter of peft.

    Its own code writes weights and reads whole gradients in every step.
    """
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        for name, adapter in adapters.items() if isinstance(adapters, dict) else ():
            kind = getattr(getattr(adapter, "peft_type", None), "value", "")
            if kind == "ADALORA" and any(parameter.requires_grad for parameter in module.parameters()):
                raise UsageError(
                    f"the adapter {name!r} is AdaLoRA, whose update_and_allocate() reads whole gradients in every step "
                    "and writes weights, which at no stage the engine's optimizer would know of: expected another "
                    "adapter, as of peft.LoraConfig, whose ranks are fixed",
                    code="model-adapter-adalora",
                )


def build(
    model: nn.Module,
    config: Config,
    mesh: Mesh,
    groups: list[dict[str, Any]],
    needs: Needs = Needs(),  # noqa: B008  (frozen)
    kind: str | None = None,
    source: Source | None = None,
) -> Core:
    """Partition ``model`` as ``config`` says, and attach to it; collective.

    groups: the optimizer's groups over its parameters · needs: the optimizer's requirements on the layout · kind: the
    optimizer's name, None for none · source: provides the values of parameters that have none on any rank.
    """
    zero = config.zero_optimization
    stage = stages.select(config, mesh.replicas)
    pool = BufferPool(mesh.platform, pins=zero.offload_optimizer.pin_memory)
    on_nccl = mesh.backend == "nccl"
    collectives = Collectives(
        mesh,
        pool,
        overlap=config.overlap_comm,
        debug=config.debug,
        direct=not on_nccl if config.reproducible is None else config.reproducible,
        hierarchical=on_nccl if config.hierarchical_reduce is None else config.hierarchical_reduce,
        reduce_dtype=precision.of(config).reduce,
    )
    by_kernel = [groups[number] for number in needs.by_kernel]
    trial = KernelTrial.of(
        config, rules_of(config, stage, mesh.ranks), collectives, needs.kernel or kind, by_kernel, needs.of_kernel
    )

    found, offer = run_on_all_ranks(
        collectives,
        "looking at the model",
        lambda: _look(model, config, groups, mesh, stage, trial, source),
    )
    settings = {name: value for name, value in config.to_dict().items() if name != "monitor"}  # rank 0's alone
    facts = {"class of the optimizer": [kind or "none"], **partition.facts(model, found, settings, groups)}
    facts["way in which weights get values (meta_init, weights=)"] = [] if source is None else source.facts()
    offers = compare(collectives, facts, offer.packed)
    settle_kernels(collectives, offers, offer.problem)
    sizes = _choose_sizes(config, stage, found, collectives)
    config = sizes.put_into(config)
    plan = lay_out(config, mesh, found, needs)
    replicas.check(config, needs, plan, kind)
    footprint = _footprint(config, stage, found, plan, needs, collectives)
    dtypes = sent(footprint.rules, plan)
    _tell_sums(config, collectives, dtypes)
    _tell_left_behind(model, found, mesh)
    collectives.prepare(dtypes)
    if source is not None:
        if source.begins and mesh.rank == 0:
            _log.warning(_NOT_IN_WEIGHTS, ", ".join(source.begins[:4]), len(source.begins))
        _begin(source, collectives)
    with ExitStack() as unfinished:  # an error of this rank, or of another one, closes the tiers
        tiers = _open_tiers(config, collectives, found, unfinished)
        core = _assemble(model, config, collectives, pool, found, footprint, tiers)
        unfinished.pop_all()
    return replace(core, sizes=sizes)


def _choose_sizes(config: Config, stage: stages.Stage, found: Partition, collectives: Collectives) -> BucketSizes:
    """The bucket sizes for keys that are "auto" in the config, the same on every rank; collective."""
    zero = config.zero_optimization
    trained = [spec for spec in found.specs if spec.trainable]
    reduces = zero.reduce_bucket_size == "auto" and bool(trained)
    gathers = zero.stage3_prefetch_bucket_size == "auto" and stage.moves_weights and bool(found.specs)
    reduction = gather = None
    if collectives.mesh.ranks > 1 and reduces:
        most = Counter(spec.dtype for spec in trained).most_common(1)[0][0]
        wire = rules_of(config, stage, 1).wire or getattr(torch, most)
        collectives.prepare([wire])
        reduction = measure_reduction(collectives, wire)
        count, apart = sum(spec.numel for spec in trained), collectives.mesh.platform.has_own_memory
        bucket = bucket_elements(reduction, count, wire.itemsize, apart=apart)
    if collectives.mesh.ranks > 1 and gathers:
        most = Counter(spec.dtype for spec in found.specs).most_common(1)[0][0]
        gather = measure_gathers(collectives, getattr(torch, most))
        ahead = prefetch_elements(gather, getattr(torch, most).itemsize)
    return BucketSizes(
        None if zero.reduce_bucket_size != "auto" else ALONE if reduction is None else bucket,
        None if zero.stage3_prefetch_bucket_size != "auto" else ALONE if gather is None else ahead,
        reduction,
        gather,
    )


def lay_out(config: Config, mesh: Mesh, found: Partition, needs: Needs, order: Sequence[int] = ()) -> Layout:
    """The layout of the parameters ``found``. order: their order by arrival of gradients, if it is known."""
    cap, align = settled(config.zero_optimization.reduce_bucket_size), mesh.platform.alignment
    hook, coding = comm_hook_of(config), weight_coding_of(config)
    if coding is not None:  # frozen weights also begin with a block
        align = max(align, coding.block * max((spec.itemsize for spec in found.specs), default=1))
    block, families = max(needs.block, 1 if hook is None else hook.block), needs.families
    came = {parameter: place for place, parameter in enumerate(order)}
    specs = [replace(spec, came=came.get(index, len(came))) for index, spec in enumerate(found.specs)]
    cuts = layout.Cuts(block, whole=hook is not None and hook.whole_parameters)
    return layout.build(specs, mesh.ranks, cap, align, cuts, families, mesh.replicas)


def comm_hook_of(config: Config) -> CommHook | None:
    """The communication hook that ``config`` names, without any state."""
    if config.zero_optimization.zero_quantized_gradients:
        return comm_hooks.by_name("int8", {"error_feedback": False})
    return comm_hooks.by_name(config.comm_hook.name, config.comm_hook.filled, config.seed)


def weight_coding_of(config: Config) -> CommHook | None:
    """The coding of weights on the wire, see ``comm_hooks``; None: they travel unchanged."""
    return comm_hooks.BlockHook("int8") if config.zero_optimization.zero_quantized_weights else None


def _assemble(
    model: nn.Module,
    config: Config,
    collectives: Collectives,
    pool: BufferPool,
    found: Partition,
    footprint: Footprint,
    tiers: Tiers,
) -> Core:
    """Place the weights of ``model``, connect the parts that move them, and attach the hooks."""
    stage, plan, which = footprint.stage, footprint.layout, footprint.precision
    homes = tiers.homes([bucket.length for bucket in plan.buckets], footprint.on_device)
    if collectives.mesh.rank == 0:
        tell_choice(tiers, footprint, homes)
        if stage.moves_weights:
            tell_window(footprint, found, _classes_of(model))
    with collectives.failures.reports_failure("initialize", lambda error: "placing the weights"):
        units = placing.place(
            found,
            plan,
            collectives,
            weights=stage.weights_after_backward,
            state=stage.state,
            which=which,
            homes=homes,
        )
        if found.left is not None:
            found.left.end(model)
        buffers = BufferSync(model, collectives)
        placing.place_buffers(model, collectives.mesh, found.source)
        buffers.broadcast(persistent_only=False)
        found = replace(found, source=None)  # it knows how the model was made
        collectives.mesh.platform.free_cached()  # the model's old memory, and the gaps between new tensors
    mesh = collectives.mesh
    groups = Replicas(config.comm_hook, mesh.rank, mesh.ranks, mesh.replicas)
    window = Window(config.gradient_accumulation_steps or 1, managed=config.managed_gradient_accumulation)
    step_state = StepState(window, mesh.rank, mesh.ranks, groups)
    reducer, schedule = _drive(config, stage, collectives, pool, plan, units, step_state)
    deferred_gather, blocks = _expect(config, stage, collectives, model, found, units)
    written = _keep_written(config, collectives, plan, found, schedule, deferred_gather)
    driven = (units, reducer, schedule, step_state, written, buffers, deferred_gather)
    core = Core(stage, collectives, pool, found, plan, *driven, Attachments(), which, tiers)
    _attach(core, model, blocks)
    _checkpoint_activations(core, model, config)
    return core


def _begin(source: Source, collectives: Collectives) -> None:
    """Begin drawing initial values from the random states of rank 0, on every rank; collective."""
    rows = [[number, state.numpy().tobytes().hex()] for number, state in source.states()]
    states = [
        (number, torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))
        for number, text in collectives.exchange_objects(rows, "states of random generators")[0]
    ]
    run_on_all_ranks(collectives, "drawing initial weights", lambda: source.begin(states))


def sent(rules: Rules, plan: Layout) -> set[torch.dtype]:
    """The dtypes of the gradients while they are sent."""
    return {wire_of(rules, each) for each in plan.flat_buffers if each.trainable}


def _tell_sums(config: Config, collectives: Collectives, sent: Collection[torch.dtype]) -> None:
    """Warn if the config asks in vain for sums in two steps, or for the backend's own sums. sent: as the function."""
    mesh = collectives.mesh
    if mesh.rank or mesh.ranks == 1:
        return
    ours = sorted(str(dtype).removeprefix("torch.") for dtype in sent if collectives.is_direct(dtype))
    if config.hierarchical_reduce and mesh.nodes.problem:
        _log.warning("hierarchical_reduce: %s; gradients are reduced in one step", mesh.nodes.problem)
    elif config.hierarchical_reduce and not all(map(collectives.is_direct, sent)):
        _log.warning(
            "hierarchical_reduce: %s adds fp32 gradients up by itself, in one step, so true changes nothing for them; "
            'set "reproducible": true beside it, or leave it out',
            mesh.backend,
        )
    if config.reproducible is False and ours:
        rounds = collectives.reduce_dtype is not torch.float32
        cures = ['"data_types": {"reduce_dtype": "fp32"}'] * rounds
        cures += ['"communication_data_type": "fp32"'] * (ours != ["float32"])
        _log.warning(
            '"reproducible": false changes nothing for gradients that are sent in %s%s: they are added here, in the '
            "declared order; %s lets %s add them",
            " and ".join(ours),
            ", of which sums are rounded" if rounds else "",
            " with ".join(cures),
            mesh.backend,
        )


def _tell_left_behind(model: nn.Module, found: Partition, mesh: Mesh) -> None:
    """Warn of plain tensor attributes that stay in the old memory of a parameter."""
    if mesh.rank == 0 and (behind := partition.left_behind(model, found)):
        pairs = [f"{attribute!r} of {parameter!r}" for attribute, parameter in behind.items()]
        _log.warning(
            "plain tensor attributes lie in the memory of parameters that are trained, which initialize moves: %s (%d "
            "in all). They keep the values of before. If forward reads them before it has set them anew: compute them "
            "in forward from the parameter",
            ", ".join(pairs[:4]),
            len(pairs),
        )


def _footprint(
    config: Config,
    stage: stages.Stage,
    found: Partition,
    plan: Layout,
    needs: Needs,
    collectives: Collectives,
) -> Footprint:
    """The facts that determine the bytes of an engine that is not placed yet. needs: as in ``build``."""
    which, hook = precision.of(config), comm_hook_of(config)
    return Footprint(
        stage,
        plan,
        which,
        rules_of(config, stage, plan.ranks),
        state=needs.bytes_of,
        kept_whole=needs.bytes_kept_whole(plan),
        beside=needs.bytes_beside(plan, stage.state, collectives.mesh.rank) + comm_hooks.kept_bytes(hook, plan),
        micro_batches=config.gradient_accumulation_steps or 1,
        prefetch=settled(config.zero_optimization.stage3_prefetch_bucket_size),
        outside=outside_bytes(found, which),
        nodes=collectives.nodes,
        message=comm_hooks.buffers_per_element(hook),
        coded=comm_hooks.bytes_per_element(weight_coding_of(config)),
        averages=config.comm_hook.name in STEPPING_APART and plan.replicas > 1,
    )


def _free_bytes(platform: Platform, found: Partition) -> int:
    """Bytes of the device's memory that are free, or held by parameters, whose memory is freed as they are placed.

    ``ConfigError`` for a CPU, whose memory is the host's.
    """
    if not platform.has_own_memory:
        raise ConfigError(
            'zero_optimization.offload_optimizer.device_memory: expected a number of bytes beside "ratio": "auto", '
            "got null, and the device is a CPU, whose memory is the host's as well: say what the device's part may be"
        )
    platform.free_cached()
    parameters = [p for p in (*found.inside, *found.outside) if found.left is None or not found.left.hides(p)]
    held = sum(p.nbytes for p in parameters if p.device == platform.device)
    return platform.free_bytes() + held


def _open_tiers(config: Config, collectives: Collectives, found: Partition, unfinished: ExitStack) -> Tiers:
    """Open the tiers, which ``unfinished`` closes; collective.

    If the ratio is "auto", every rank chooses it for the same memory: the smallest free memory of all ranks.
    """
    zero, mesh = config.zero_optimization, collectives.mesh
    wanted = zero.offload_optimizer
    measures = wanted.ratio == "auto" and wanted.device_memory is None

    def open_tiers() -> tuple[Tiers, int]:
        _give_threads(mesh.rank, offloads=wanted.device != "none")
        free = _free_bytes(mesh.platform, found) if measures else 0
        return unfinished.enter_context(closing(Tiers(zero, config.aio, mesh.rank, mesh.platform))), free

    tiers, free = run_on_all_ranks(collectives, "opening the tiers", open_tiers)
    if measures:
        tiers.share(min(collectives.exchange_objects(free, "free memory for the tiers")))
    return tiers


def _give_threads(rank: int, *, offloads: bool) -> None:
    """If the host computes the update, let its kernels use the cores that torchrun's OMP_NUM_THREADS=1 leaves idle."""
    threads = host_threads(offloads=offloads)
    if threads is None:
        return  # another engine of the process may have set the number
    kernels.use_threads(threads)
    if rank == 0:
        _log.info(
            "native kernels take %d thread(s) of the host on this rank; SHARDENGINE_THREADS says another number",
            threads,
        )


def succeed(core: Core, model: nn.Module, config: Config, found: Partition, plan: Layout, units: list[Unit]) -> Core:
    """The core that replaces ``core``, with a new layout and its ``units``. The hooks of ``core`` are off already."""
    reducer, schedule = _drive(config, core.stage, core.collectives, core.pool, plan, units, core.step_state)
    reducer.take_over(core.reducer, core.layout)
    deferred_gather, blocks = _expect(config, core.stage, core.collectives, model, found, units)
    written = _keep_written(config, core.collectives, plan, found, schedule, deferred_gather)
    new = replace(
        core,
        written=written,
        partition=found,
        layout=plan,
        units=units,
        reducer=reducer,
        schedule=schedule,
        deferred_gather=deferred_gather,
    )
    _attach(new, model, blocks)
    _checkpoint_activations(new, model, config)
    return new


def rules_of(config: Config, stage: stages.Stage, ranks: int) -> Rules:
    """The rules for gradients that follow from stage and config."""
    which = precision.of(config)
    several = (config.gradient_accumulation_steps or 1) > 1
    hook = comm_hook_of(config)
    return Rules(
        gradients=stage.gradients,
        state=stage.state,
        divisor=config.gradient_divide_factor or (ranks if config.gradient_allreduce_op == "mean" else 1),
        wire=which.wire if hook is None else hook.wire,
        reduce=which.reduce,
        accumulate=which.accumulate if several else torch.float32,
        scaled=which.scales_loss,
        static=config.static_graph,
        steps_unused=config.step_unused_parameters,
    )


def _drive(
    config: Config,
    stage: stages.Stage,
    collectives: Collectives,
    pool: BufferPool,
    plan: Layout,
    units: list[Unit],
    step_state: StepState,
) -> tuple[Reducer, Schedule]:
    """The reducer and the schedule, which move the gradients and the weights of ``units``."""
    by_index = {b.layout.index: b for unit in units for flat in unit.flat_buffers for b in flat.buckets}
    buckets = [by_index[index] for index in range(len(plan.buckets))]
    members = {member.index: member.parameter for unit in units for member in unit.members}
    parameters = [members[index] for index in range(len(plan.parameters))]
    rules = rules_of(config, stage, collectives.mesh.ranks)
    reducer = Reducer(plan, buckets, collectives, pool, rules, step_state, parameters)
    reducer.use(comm_hook_of(config))
    prefetch = settled(config.zero_optimization.stage3_prefetch_bucket_size)
    schedule = Schedule(units, stage, collectives, reducer, prefetch, weight_coding_of(config))
    return reducer, schedule


def _keep_written(
    config: Config,
    collectives: Collectives,
    plan: Layout,
    found: Partition,
    schedule: Schedule,
    deferred_gather: DeferredGather | None,
) -> WrittenWeights:
    """The part that keeps the values which user code writes into weights that ``schedule`` moves."""
    coded = weight_coding_of(config) is not None and collectives.mesh.ranks > 1
    written = WrittenWeights(schedule.units, plan, found, schedule.step_state, deferred_gather, coded=coded)
    schedule.tell(written)
    return written


def _expect(
    config: Config,
    stage: stages.Stage,
    collectives: Collectives,
    model: nn.Module,
    found: Partition,
    units: list[Unit],
) -> tuple[DeferredGather | None, list[tuple[str, nn.Module]]]:
    """The gather that waits for stepped weights (``overlap_param_gather``), and the modules that get hooks."""
    if not config.overlap_param_gather or not stage.publishes_after_step or collectives.mesh.ranks == 1:
        return None, found.units
    blocks, block_of = partition.find_blocks(
        model, config.zero_optimization.units, {id(p) for p in found.names.values()}
    )
    numbers = [block_of.get(id(parameter), 0) for parameter in found.inside]
    members_of = [[i for i, n in enumerate(numbers) if n == group] for group in range(len(blocks) + 1)]
    return DeferredGather(units[0].members, members_of), blocks


def _attach(core: Core, model: nn.Module, units: list[tuple[str, nn.Module]]) -> None:
    core.written.note_seen()
    modules = {module: index for index, (_, module) in enumerate(units, start=1)}
    trainable = {i: p for i, p in enumerate(core.partition.inside) if core.layout.parameters[i].trainable}
    names = [spec.name for spec in core.layout.parameters]

    def report(error: BaseException, what: str) -> None:
        core.collectives.failures.report_outside(error, what)  # those of today's groups: reset() makes new ones

    gradients = GradientHooks(core.schedule, trainable, names, core.mesh.rank, report)
    core.schedule.call_when_complete(gradients.run)
    core.attachments.handles.append(gradients)
    if (dtype := core.precision.inputs) is not None:
        core.attachments.handles.extend(hooks.attach_input_cast(model, dtype, core.mesh.platform.autocast_type))
    if not core.stage.moves_weights:
        core.attachments.handles.extend(hooks.attach_root_events(core.schedule, model))
        if core.deferred_gather is not None:
            core.attachments.handles.extend(hooks.attach_deferred_gather(core.deferred_gather, model, modules))
        return
    if core.mesh.ranks > 1 and "generate" in dir(model):
        # transformers then runs as many forwards on every rank, even if texts differ in length: each one gathers
        core.attachments.mark(model)
    for module, index in modules.items():
        if is_lookup(module):
            core.schedule.read_in_forward_only(index)
    core.attachments.handles.extend(hooks.attach_unit_events(core.schedule, model, modules))
    _watch(core, model, modules)
    _attach_state_dicts(core, model)


def _attach_state_dicts(core: Core, model: nn.Module) -> None:
    """Sharded weights have no values in a state dict, and take none from one."""
    places = {id(member.parameter): (unit, member.index) for unit in core.units for member in unit.members}

    def value_of(parameter: nn.Parameter) -> Tensor | None:
        """The tensor for ``parameter`` in a state dict: a stand-in without values unless it is summoned.

        This also holds while its unit is gathered, because that memory is freed afterwards.
        """
        if (given := core.attachments.whole.get(id(parameter))) is not None:
            return given
        for path, each in inner.parts_of(parameter):
            unit, index = places.get(id(each), (None, 0))
            if unit and not unit.is_summoned(index):
                name = unit.name_of(index).removesuffix(path)
                return stand_in(parameter, f"parameter {name!r} (rank {core.mesh.rank})")
        return None

    def refuse_load(part: nn.Module) -> None:
        for parameter in (each for p in part.parameters(recurse=False) for _, each in inner.parts_of(p)):
            unit, index = places.get(id(parameter), (None, 0))
            if unit and unit.state is UnshardState.SHARDED and not (core.attachments.reads or unit.is_summoned(index)):
                raise UsageError(
                    "load_state_dict() while the weights are sharded would be lost: call engine.load_state_dict(...), "
                    "or load it inside `with engine.full_params(writable=True):`, on every rank, or before initialize",
                    code="state-dict-into-sharded-weights",
                )

    core.attachments.handles.extend(hooks.attach_state_dict_names(model, value_of))
    core.attachments.handles.extend(hooks.attach_load_guard(model, refuse_load))


def _classes_of(model: nn.Module) -> dict[str, str]:
    """Each parameter's name → the class name of its module."""
    return {
        name + path: type(model.get_submodule(name.rpartition(".")[0])).__name__
        for name, parameter in model.named_parameters()
        for path, _ in inner.parts_of(parameter)
    }


def _watch(core: Core, model: nn.Module, modules: dict[nn.Module, int]) -> None:
    """Notice reads of sharded weights outside of their unit's forward."""
    unit_of = {id(member.parameter): unit.index for unit in core.units for member in unit.members}
    names = core.partition.first_names()
    told: set[int] = set()

    def tell(_name: str, parameter: int) -> None:
        number = unit_of[parameter]
        if core.mesh.rank == 0 and number not in told:
            told.add(number)
            _log.warning(
                "parameter %r is read outside of the forward of its unit %r, which is therefore gathered and kept "
                "until the window of micro-batches ends; to have it there anyway, leave it out of "
                "zero_optimization.units: list there the classes of the modules that are to be gathered one by one",
                names[parameter],
                core.units[number].name,
            )

    core.attachments.handles.extend(hooks.attach_reads(core.schedule, modules, unit_of, tell))
    core.partition.places[:] = partition.places_of(model)


def _checkpoint_activations(core: Core, model: nn.Module, config: Config) -> None:
    if config.activation_checkpointing.enabled:
        offload = config.activation_checkpointing.cpu_offload
        saving = ActivationStore(core.mesh.platform, holds_weights).saving if offload else nullcontext
        if offload:
            core.mark_weights()
        blocks = partition.find_units(model, config.zero_optimization.units)
        core.attachments.handles.extend(activation_checkpointing.attach(blocks, saving))
        core.attachments.caching.extend(_without_caches(model))


def _without_caches(model: nn.Module) -> list[Any]:
    """Turn off ``use_cache`` in the Hugging Face configs of ``model``, and return the configs that had it on.

    A checkpointed block cannot fill a cache of keys and values. A call that asks for a cache itself raises there.
    """
    configs = {id(found): found for module in model.modules() if (found := getattr(module, "config", None)) is not None}
    asking = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in asking:
        config.use_cache = False
    return asking
