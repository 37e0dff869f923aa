"""Tables and checks of the source papers: never loaded by ``dprlhf train``, an extra to install.

:mod:`~dprlhf.papers.control` runs the private updates on control, dosing and bandit tasks, and
:mod:`~dprlhf.papers.regression` has the papers' private least-squares oracles on plain arrays.
Nothing outside the command line imports this package.
"""
