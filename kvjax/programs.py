"""How the programs are compiled whose results are bits that others must find again.

XLA may time several ways to compute a product or a sum when it compiles a program for a GPU, and take the fastest one. The ways round
differently, and which one wins depends on what else the machine does. So two processes could get different bits, and so could two programs
of one process, if one of them came from a cache of programs that another process filled. `program` fixes the way: products by cuBLAS with
the algorithm that it proposes first, sums by XLA's own kernels.
"""

from __future__ import annotations

import functools

import jax

FIXED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Options of XLA. Devices other than GPUs ignore them."""

program = functools.partial(jax.jit, compiler_options=FIXED)
"""`jax.jit` with these options. They are of a whole program: inside another jitted function, `grad` or `scan`, JAX raises ValueError."""
