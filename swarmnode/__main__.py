"""`python -m swarmnode`."""

from swarmnode.cli import main

main()
