"""Settings chosen on public prompts, at no privacy cost.

:mod:`~dprlhf.tuning.public_rows` divides the public prompts, :mod:`~dprlhf.tuning.stand_in` runs a
recipe on them in place of the users.
"""
