"""GPU threads by numpy: values, memory, copies, inline PTX, lanes, and whole kernels on them. For tests of kernels
without a GPU."""
