"""Ensemble++: scalable Thompson-sampling exploration.

One rank-1 step moves a mean and M ensemble directions alike; a random index then turns one forward pass into one
posterior sample.
"""

from importlib.metadata import version

__version__ = version("ensemblepp")
