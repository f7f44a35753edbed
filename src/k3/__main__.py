"""`python -m k3`."""

from k3.cli.main import run

run()
