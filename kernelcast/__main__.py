"""``python -m kernelcast``: the command line."""

from kernelcast.cli import main

main()
