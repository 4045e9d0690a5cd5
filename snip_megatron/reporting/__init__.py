"""HTML reports about runs and blamed steps, and SNIP's figures in wandb and TensorBoard."""

from importlib import resources


def template_text(name: str) -> str:
    """Return the content of a file in ``templates/``."""
    return resources.files(__name__).joinpath("templates", name).read_text(encoding="utf-8")
