"""Training: from a run config to a folder with metrics, checkpoints and the final model."""
