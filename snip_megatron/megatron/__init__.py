"""Everything that touches Megatron. Only ``compat`` names what is private or differs between its versions."""
