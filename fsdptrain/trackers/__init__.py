"""Show a run in TensorBoard, W&B, MLflow and Trackio, each in a process of its own. No torch."""
