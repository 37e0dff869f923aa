"""Tables and checks of the source papers: never loaded by ``dprlhf train``, an extra to install.

:mod:`~dprlhf.papers.control` runs the private updates on control, dosing and bandit tasks,
:mod:`~dprlhf.papers.regression` has the papers' private least-squares oracles on plain arrays, and
:mod:`~dprlhf.papers.errata` the closed forms that the papers print. Nothing outside the command
line imports this package.
"""
