"""Files of other tools, read and written."""

# the model inside torch.compile, FullyShardedDataParallel and checkpoint_wrapper: a word in the names of its tensors
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
