"""GPU threads by numpy: values, memory, inline PTX, lanes, and whole kernels on them. For tests of kernels without a GPU."""
