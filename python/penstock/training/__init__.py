"""Training over groups: gradients, their checks and tuning, elastic jobs, optimizers."""
