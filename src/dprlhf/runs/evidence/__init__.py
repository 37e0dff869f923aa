"""Evidence for an assessor: a signed page on what a run promised, and what shows it."""
