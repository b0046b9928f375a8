"""The private names that torchcomp uses, each with its purpose: any release can change them."""

PRIVATE = {
    "torch": {
        "_C": "contains the names below",
        "_dynamo": "imported before any process group; see torchcomp/ddp/__init__.py",
        "_foreach_add": "adds many small tensors in one launch",
        "_foreach_add_": "adds many small tensors in place, in one launch",
        "_foreach_copy_": "copies many small tensors in one launch",
        "_foreach_max": "finds the largest elements of many small tensors in one launch",
        "_foreach_mul_": "scales many small tensors in one launch",
        "_foreach_norm": "computes the norms of many small tensors in one launch",
        "_foreach_sub_": "subtracts many small tensors in one launch",
        "_foreach_zero_": "clears many small tensors in one launch",
    },
    "torch._C": {
        "_distributed_c10d": "declares the type of DDP's buckets",
        "_current_graph_task_id": "tells whether a backward pass is running",
    },
    "torch.autograd.Variable": {
        "_execution_engine": "calls a function at the end of a backward pass",
    },
    "torch.autograd.profiler": {
        "_is_profiler_enabled": "tells whether labels are worth their time",
    },
    "torch.nn.modules.batchnorm": {
        "_BatchNorm": "base class of all BatchNorm layers",
    },
    "torch.utils": {
        "_pytree": "goes through nested outputs as DDP and FSDP2 do",
    },
    "torch.nn.Module": {
        "_compiled_call_impl": "tells whether module.compile() was called",
    },
    "torch._dynamo.OptimizedModule": {
        "_orig_mod": "the module that torch.compile wraps, and a prefix of parameter names",
    },
    "torch.nn.Parameter": {
        "_in_backward_optimizers": "set if an optimizer steps inside the backward pass",
    },
    "torch.nn.parallel.DistributedDataParallel": {
        "_comm_hooks": "communication hooks, of which DDP allows one",
        "_delay_all_reduce_params": "parameters of delay_all_reduce_named_params",
        "_get_ddp_logging_data": "tells whether a gradient was reduced already",
        "_has_rebuilt_buckets": "tells whether a gradient was reduced already",
        "_join_config": "tells whether model.join() is in use",
        "_use_python_reducer": "tells whether torch.compile replaces DDP's reducer",
    },
    "torch.distributed.ProcessGroup": {
        "_get_backend": "finds the backend of a device",
    },
    "torch.distributed.ProcessGroupGloo": {
        "_allgather_base": "gathers equal parts in one tensor",
        "_reduce_scatter_base": "sums equal parts of one tensor",
    },
    "torch.distributed.fsdp.FSDPModule": {
        "_get_fsdp_state": "finds the object below",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_fsdp_param_group": "has the parameters that FSDP2 reduces together, in their order",
        "_state_ctx": "tells whether FSDP2 awaits the end of a backward pass",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "_all_reduce_hook": "tells whether there is a hook already",
    },
    "torch.distributed.distributed_c10d": {
        "_get_default_store": "where the ranks of a private group find each other",
    },
    "torch.distributed.Backend.Options": {
        "_timeout": "the group's timeout, for a private group beside it",
    },
    "torch.optim.Optimizer": {
        "_optimizer_step_pre_hooks": "absent from wrappers that have no step hooks",
    },
    "torch.Tensor": {
        "_version": "tells whether a tensor was changed in place",
    },
    "torch.amp.GradScaler": {
        "_get_scale_async": "returns the loss scale on the device, without a wait",
        "_unscale_grads_": "lets a scaler step an optimizer whose layers were all dropped",
    },
}
"""Private names of torch that torchcomp uses, by owner, each with its purpose."""

PRIVATE_OF_FRAMEWORKS = {
    "lightning": {
        "_ddp_comm_hook": "tells whether the strategy installs its own communication hook",
        "_forward_module": "the DDP model inside a model that Fabric prepared",
    },
    "torchft": {
        "_commit_failures": "tells whether the manager has voted on a step",
        "_group_world_size": "ranks of a replica group, which must be 1",
        "_pg": "the process group of the ranks that take part",
        "_quorum_id": "changes when a rank joins, leaves or dies",
        "_replica_world_size_mode": "how spare ranks count: torchcomp supports one way",
        "_use_async_quorum": "whether ranks heal during a step, which torchcomp refuses",
    },
}
"""The same for other packages. `make test-integrations` runs what uses them."""
