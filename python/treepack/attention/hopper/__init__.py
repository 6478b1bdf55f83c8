"""The kernels of tree attention for Hopper, in Gluon; nothing here but `launch` imports torch."""
