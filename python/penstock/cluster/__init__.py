"""Deployments: which servers and aggregators reduce which ranks' tensors, and the jobs that are opened on them."""
