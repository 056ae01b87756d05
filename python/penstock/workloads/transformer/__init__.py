"""Transformers of three kinds as definitions, trained data parallel or in a pipeline: what `penstock characterize` runs.

The shapes of the characterisation paper (its table 1: GPT-2 medium and large, BERT large, T5 large) and small siblings that train
on a laptop. The text is made of random tokens: what a step costs does not depend on it.
"""
