"""Thompson-sampling exploration with Ensemble++.

A random index and M ensemble directions turn one forward pass into one posterior sample; one incremental step moves
the mean and all directions alike.
"""

import importlib.metadata

from ensemblepp.online import OnlineBandit, OnlineDecision

__version__ = importlib.metadata.version("ensemblepp")

__all__ = ["OnlineBandit", "OnlineDecision", "__version__"]
