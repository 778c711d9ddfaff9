"""The error of kernels. A module of its own: prefix hashing needs it without torch."""


class KernelError(Exception):
    """A kernel cannot be built, is not available, does not support a shape, or got a cache without memory."""
