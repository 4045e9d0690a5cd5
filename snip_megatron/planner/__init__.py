"""What a configuration will give, before it is launched: shapes, memory, time and SNIP's overhead (README.md)."""
