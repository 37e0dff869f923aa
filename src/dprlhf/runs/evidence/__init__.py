"""Evidence for an assessor: a page of what a run promised, and of the figures that show it."""
