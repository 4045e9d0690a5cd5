"""The commands of ``snip``. Each is a module, listed in the table of ``cli.py``."""
