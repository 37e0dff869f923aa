"""The loop, and what surrounds it: assembly, evaluation, processes and the dry run."""
