"""``python -m dprlhf``: what launchers of several processes start."""

from dprlhf.cli import main

main()
