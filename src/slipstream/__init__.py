"""Slipstream: hides communication behind compute in distributed training, and tells where that stops working."""

__version__ = "0.0.1"
