"""`snip doctor`: what this machine can run, and what keeps it from running the rest."""
