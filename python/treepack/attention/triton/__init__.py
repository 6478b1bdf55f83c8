"""The portable kernels of tree attention, in plain Triton."""
