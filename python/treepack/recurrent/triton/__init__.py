"""The kernels of recurrent layers on a tree: the walk of the state and of its gradient, the convolution."""
