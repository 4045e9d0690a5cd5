"""SNIP in a plain torch training loop of one process, without Megatron: :func:`convert` and :meth:`PlainSnip.step`."""

from snip_megatron.plain.loop import PlainSnip, convert

__all__ = ["PlainSnip", "convert"]
