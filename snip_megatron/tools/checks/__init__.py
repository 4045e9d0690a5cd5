"""``snip doctor``: checks what this machine can run, and what is missing for the rest."""
