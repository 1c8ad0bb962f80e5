"""The mechanisms that hide communication behind compute in training, on torch.distributed.

Needs the extra `torch`. Imports nothing of Slipstream above `slipstream.core`.
"""
