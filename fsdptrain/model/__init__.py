"""The model: configuration, skeleton, units, weights, loss, kernels."""
