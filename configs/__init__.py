"""Hydra configurations, read as `pkg://ensemblepp.configs`; the group folders need no `__init__.py`."""

if __name__ != "ensemblepp.configs":
    raise ImportError(
        f"the folder configs is the package ensemblepp.configs: import ensemblepp.configs, not {__name__}"
    )
