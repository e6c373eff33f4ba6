"""``python -m ucpstore``."""

from ucpstore.cli.main import main

main(prog_name="ucpstore")
