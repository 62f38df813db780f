"""The same step on fake tensors."""
