"""Who computes what: the costs of a model, unit by unit."""
