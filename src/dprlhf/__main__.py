"""``python -m dprlhf``: what launchers of several processes start."""

from dprlhf.cli.app import main

main()
