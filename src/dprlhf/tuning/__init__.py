"""Settings chosen on public prompts, at no privacy cost.

:mod:`~dprlhf.tuning.public_rows` divides the public prompts, :mod:`~dprlhf.tuning.stand_in` runs a
recipe on them in place of the users, :mod:`~dprlhf.tuning.search` looks for settings with such runs
(the table of keys is in :mod:`~dprlhf.tuning.space`), and :mod:`~dprlhf.tuning.evidence` writes the
tuned recipe.
"""
