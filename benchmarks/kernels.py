"""Prints the kernels' speeds beside the machine's limits: `python benchmarks/kernels.py`."""

from k3.kernels.bench import measure

if __name__ == "__main__":
    print("\n".join(measure().lines()))
