"""Benchmarks: what a step costs, beside peer systems on the same work. Run alone on the machine; see `__main__`."""
